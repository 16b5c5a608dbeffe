"""The bundled demonstration model: its problems, its weights and its recorded score.

``tasks`` makes the problems, with only the standard library, from the facts in ``facts.json``; the checkpoint in
``model/`` and the numbers in ``score.json`` come from the repository's ``tools/train_demo.py``.
"""

__all__ = ["models", "run", "tasks"]
