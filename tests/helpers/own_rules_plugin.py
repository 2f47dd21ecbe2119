"""A plugin, for tests: registers what is in ``own_rules``."""

import own_rules

own_rules.register()
