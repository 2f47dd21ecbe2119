"""Keras models on ps tasks: ``fit`` of a compiled model, its batches trained on all workers.

``from psync.integrations.keras import PSModel`` imports Keras. ``served_model``: what a program
uses, and a step; ``models`` the model that each task builds, ``steps`` what a worker computes of a
batch, ``metrics`` how its metrics add up, ``rules`` which rule an optimizer becomes, and ``fit``
how ``Trainer`` drives all this. Begin with ``served_model``.
"""

from psync.integrations.keras.served_model import PSModel as PSModel
from psync.integrations.keras.served_model import ServedModel as ServedModel
