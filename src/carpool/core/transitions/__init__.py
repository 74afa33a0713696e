"""What each kind of event does to the state: one function for each, found by its `@handles`.

`State.apply` calls them. Events of an earlier attempt, and events about jobs that have ended, are ignored.
"""

from carpool.core.transitions import endings as endings
from carpool.core.transitions import nodes as nodes
from carpool.core.transitions import plans as plans
from carpool.core.transitions import requests as requests
from carpool.core.transitions import settings as settings
from carpool.core.transitions import workers as workers
