"""The scheduler without IO, clock, torch or numpy: events in, decisions out.

Importing the package loads `transitions`, so that `State.apply` finds the functions that handle events.
"""

from carpool.core import transitions as transitions
