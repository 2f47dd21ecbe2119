"""Keras models on ps tasks: ``fit`` of a compiled model, its batches trained on all workers.

``from psync.integrations.keras import ServedModel`` imports Keras. ``served_model`` is what programs
use, and a step; ``models`` the model as each task builds it, ``steps`` what a worker computes of a
batch, ``metrics`` how its metrics add up, ``rules`` which rule an optimizer becomes, and ``fit``
how ``Trainer`` drives all this. Begin with ``served_model``.
"""

from psync.integrations.keras.served_model import ServedModel as ServedModel
