"""The bundled demonstration model: its problems, the script that trains it, its weights and its recorded score.

``tasks`` makes the problems with only the standard library; ``train`` makes the checkpoint in ``model/`` and the
numbers in ``score.json``.  Nothing here depends on how a checkpoint is split or streamed.
"""
