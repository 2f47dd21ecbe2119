"""The image of a ps: what it holds at a cut, frozen in place, and taken up again.

Layer: L1. Imports: errors, image_state.

To freeze is to hold references to blocks: no copy is made, and updates go on, which replace the
blocks that are held (see ``blocks``). To thaw is to make a store of a state, of which all arrays
are empty, and to fill them piece by piece.
"""

from __future__ import annotations

from psync.image_state import ImageItem as ImageItem
from psync.image_state import ImageState as ImageState
from psync.image_state import OptimizerImage as OptimizerImage
