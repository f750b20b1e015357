"""How a model is trained: one file per strategy, which holds only what differs from `single`.

Strategies of a study are in its own folder (lockstep/report/studies.py), and imported as if they were in this one.
"""

from lockstep.paths import STUDIES

__path__ += map(str, STUDIES.glob("*/strategies"))
