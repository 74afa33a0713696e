"""Everything that finds moves for the jobs of one scheduling pass.

`policy` makes it when the first job has to be weighed. Many passes only start jobs on free GPUs, or find that no job is
to be tried again, and do not need it.
"""

from carpool.core.draft import Draft
from carpool.policies.joint.cell_speeds import CellSpeedsCache
from carpool.policies.joint.deferred_candidates import DeferredCandidates
from carpool.policies.joint.displacements import Displacements
from carpool.policies.joint.join_candidates import JoinCandidates
from carpool.policies.joint.objective import Objective
from carpool.policies.joint.pause_candidates import PauseCandidates
from carpool.policies.joint.places import Places
from carpool.policies.joint.resume_candidates import ResumeCandidates
from carpool.policies.joint.shared_candidates import SharedCandidates
from carpool.policies.joint.start_up_candidates import StartUpCandidates
from carpool.policies.sharing.candidates import Candidates, OptionCache


class Finders:
    """The candidates of each kind, over one draft and one objective."""

    def __init__(
        self, draft: Draft, objective: Objective, patience: float, options: OptionCache, cell_speeds: CellSpeedsCache
    ) -> None:
        candidates = Candidates(draft, options)
        self.joins = JoinCandidates(
            draft, candidates, objective, SharedCandidates(draft, candidates, objective, cell_speeds)
        )
        self.deferred = DeferredCandidates(draft, objective)
        self.displacements = Displacements(draft, objective, patience)
        places = Places(draft, self.displacements)
        self.pausing = PauseCandidates(draft, objective, self.displacements, places)
        self.starting_up = StartUpCandidates(draft, objective, self.displacements, places)
        self.resuming = ResumeCandidates(draft, objective, self.displacements)
