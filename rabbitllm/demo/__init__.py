"""The bundled demonstration model: its problems, the script that trains it, its weights and its recorded score.

``tasks`` makes the problems and needs nothing but the standard library; ``train`` makes the checkpoint in
``model/`` and the numbers in ``score.json``.  Nothing here knows how a checkpoint is split or streamed.
"""
