"""A plan under construction.

Policies `start`, `assign`, `pause`, `resume`, `move` and `stop` jobs in a draft. The draft shows the cluster as it
would be with these decisions, picks consolidated GPUs and collects the decisions. It is an overlay over the view: it
keeps the differences, and copies the index of free GPUs where it changes it.
"""

from collections.abc import Collection, Container, Iterable, Sequence, Set

from carpool.core.free import FreeGpus
from carpool.core.model import Allocation, Decision, GpuId, JobId
from carpool.core.rules import Resident, exclusive_problem, resident_of, sharing_problem
from carpool.core.shapes import Shape, Size
from carpool.core.view import FreeGpusView, HostsView, JobView, ScanView, View


class Draft:
    """The cluster as a policy sees it while it decides: the view and the decisions so far."""

    def __init__(self, view: View, *, pauses: bool = False, held: dict[str, int] | None = None) -> None:
        """`pauses`: the policy pauses and resumes jobs. For others a paused job counts as if it computed, because it
        will. `held`: where to note what groups hold, for a scan of the queue that is older than the draft."""
        self.view = view
        self.pauses = pauses
        self._most_jobs = view.resident_per_gpu if pauses else view.jobs_per_gpu
        self.decisions: list[Decision] = []
        self.free_count = view.free.count
        """Number of GPUs that are free in the draft."""
        self._kept = {job.shape: (job, number) for job, number in view.kept_for()} if view.shares_count else {}
        """The jobs for which free GPUs are kept from jobs whose groups are not entitled to them, by shape."""
        self._kept_gpus: dict[int, int] | None = None  # how many, by the priority of others; None: the draft changed
        self._kept_groups: set[str | None] = set()
        self._placed: dict[JobId, tuple[GpuId, ...]] = {}
        self._free: FreeGpus | None = None  # a copy of the view's free GPUs, once the draft changes them
        self._just_taken: list[GpuId] = []
        self._arrived: dict[GpuId, list[Resident]] = {}
        self._stopped: set[int] = set()
        self._touched: dict[GpuId, None] = {}
        self._inactive: set[int] = set()
        self._switched: dict[int, bool] = {}  # jobs that the draft paused (False) or resumed (True), by `seq`
        self._memory: dict[int, int] = {}  # bytes that those of them hold which were or are swapped out, by `seq`
        self._shareable: int | None = None
        self._changed: list[GpuId] = []  # GPUs that changed before `shareable` was first asked
        self._held: dict[str, list[int]] = {}
        self._held_by_groups: dict[str, int] = {} if held is None else held  # where it is another number in the draft
        self._residents: dict[GpuId, list[Resident]] = {}  # as last asked; forgotten where the draft changes a GPU
        self._active: dict[GpuId, list[Resident]] = {}

    # ---- what policies read -----------------------------------------------------------------------------------

    def pending(self, largest: int | None = None, without: Container[Shape] = ()) -> ScanView:
        """Return the pending jobs in the policy's order, except gangs of more than `largest` GPUs and some shapes."""
        return self.view.queue.scan(largest, without, self._held_by_groups)

    def shareable(self) -> int:
        """Return the GPUs that hold jobs and have room for one more, one bit each."""
        if self._shareable is None:
            self._shareable = 0
            for jobs in range(1, self._most_jobs):
                self._shareable |= self.view.gpus_holding(jobs)
            self._shareable &= ~self.view.topology.closed_gpus
            self._note_room(self._changed)
        return self._shareable

    def residents(self, gpu: GpuId) -> Sequence[Resident]:
        """Return the residents of a GPU in the draft."""
        known = self._residents.get(gpu)
        if known is None:
            known = self._residents[gpu] = self._list_residents(gpu)
        return known

    def _list_residents(self, gpu: GpuId) -> list[Resident]:
        staying = [resident_of(record) for record in self.view.jobs_on(gpu) if record.seq not in self._stopped]
        if self.view.paused and not self.pauses:
            staying = [resident._replace(active=True) for resident in staying]
        elif self._switched:
            staying = [self._as_switched(resident) for resident in staying]
        return staying + self._arrived.get(gpu, [])

    def _as_switched(self, resident: Resident) -> Resident:
        seq = resident.record.seq
        if seq not in self._switched:
            return resident
        return resident._replace(active=self._switched[seq], memory=self._memory.get(seq, resident.memory))

    def active_on(self, gpu: GpuId) -> Sequence[Resident]:
        """Return the residents of a GPU that compute in the draft."""
        known = self._active.get(gpu)
        if known is None:
            known = self._active[gpu] = [resident for resident in self.residents(gpu) if resident.active]
        return known

    def _forget(self, gpus: Iterable[GpuId]) -> None:
        """Forget the residents of GPUs that the draft is about to change."""
        for gpu in gpus:
            self._residents.pop(gpu, None)
            self._active.pop(gpu, None)

    def jobs_on(self, gpu: GpuId) -> Sequence[JobView]:
        """Return the jobs on a GPU in the draft."""
        if self._stopped or gpu in self._arrived:
            return tuple([resident.record for resident in self.residents(gpu)])
        return self.view.jobs_on(gpu)

    def fits(self, gpu: GpuId, memory: int, *, again: bool = False) -> bool:
        """Return whether a GPU has room for another resident with this many bytes, computing or not.

        `again`: for one that is there and was swapped out.
        """
        view = self.view
        if view.topology.is_closed(gpu) or not (again or self._may_be_entered(gpu)):
            return False
        if self._stopped or self._memory or gpu in self._arrived:
            there = self.residents(gpu)
            number, used = len(there), sum([resident.memory for resident in there])
        else:  # mostly: as the view counts it
            number, used = len(view.jobs_on(gpu)), view.memory_used(gpu)
        return number < view.resident_per_gpu and used + memory <= view.topology.memory_of(gpu)

    def _may_be_entered(self, gpu: GpuId) -> bool:
        """Return whether no resident of a GPU, paused or not, is to be alone there."""
        for record in self.jobs_on(gpu):  # noqa: SIM110 (a generator costs more, and this is asked often)
            if record.shape.exclusive:
                return False
        return True

    def accepts(self, gpu: GpuId, record: JobView, size: Size) -> bool:
        """Return whether the rules let a job join the residents of a GPU at this size."""
        view = self.view
        if view.topology.is_closed(gpu):
            return False
        guest = Resident(record, size.accumulation, size.memory)
        together, memory = [*self.residents(gpu), guest], view.topology.memory_of(gpu)
        return sharing_problem(together, view, memory) is None and exclusive_problem(together) is None

    def with_paused(self, gpus: Set[GpuId]) -> Set[GpuId]:
        """Return those of some GPUs that may hold jobs that a policy that pauses jobs may resume."""
        return gpus & self.view.with_paused() | gpus & self._touched.keys() if self.pauses else set()

    def idle(self) -> list[GpuId]:
        """Return the GPUs that hold jobs, none of which computes in the draft."""
        if self._stopped:
            gpus = {*self.view.idle(), *self._touched}
            return sorted([gpu for gpu in gpus if self.jobs_on(gpu) and not self.active_on(gpu)])
        touched = [gpu for gpu in self._touched if not self.active_on(gpu)]
        return sorted([*(gpu for gpu in self.view.idle() if gpu not in self._touched), *touched])

    def only_resident(self, record: JobView) -> bool:
        """Return whether a job has all of its GPUs to itself in the draft, paused jobs included."""
        for gpu in self.gpus_of(record):  # noqa: SIM110 (a generator costs more, and this is asked often)
            if len(self.jobs_on(gpu)) != 1:
                return False
        return True

    @property
    def hosts(self) -> HostsView:
        """The jobs that may take a guest, as the view has them: for a policy that pauses jobs, only active ones."""
        return self.view.active_hosts if self.pauses else self.view.hosts

    @property
    def touched(self) -> Collection[GpuId]:
        """The GPUs on which this draft placed, paused or resumed a job."""
        return self._touched

    @property
    def inactive(self) -> Set[int]:
        """The `seq` of the jobs that this draft stopped or paused."""
        return self._inactive

    def gpus_of(self, record: JobView) -> tuple[GpuId, ...]:
        """Return the GPUs of a job in the draft."""
        return self._placed.get(record.job.id, record.gpus)

    def free_for(self, record: JobView) -> int:
        """Return the number of free GPUs that a job may use: some may be kept for other jobs."""
        return max(0, self.free_count - self._kept_from(record)) if self._kept else self.free_count

    def _kept_from(self, record: JobView) -> int:
        """Return the number of GPUs that are kept for others than a job. Its own group's are not."""
        ours = record.shape
        if self._kept_gpus is None:
            self._kept_gpus, self._kept_groups = {}, {shape.group for shape in self._kept}
        if ours.group in self._kept_groups:
            return 0
        kept = self._kept_gpus.get(ours.priority)
        if kept is None:
            first = [(shape, *one) for shape, one in self._kept.items() if shape.priority >= ours.priority]
            kept = sum([shape.gpus * number for shape, job, number in first if self.may_start(job)])
            self._kept_gpus[ours.priority] = kept
        return kept

    def some_free(self, record: JobView, at_most: int, size: Size) -> tuple[GpuId, ...]:
        """Return up to `at_most` free GPUs for a job on which the size fits, as consolidated as possible."""
        for count in range(min(at_most, self.free_for(record)), 0, -1):
            gpus = self._pick(count, size)
            if gpus is not None:
                return gpus
        return ()

    def may_start(self, record: JobView) -> bool:
        """Return whether the limits of the job's user and its group's cap and share allow it to start."""
        view, user, group = self.view, record.shape.user, record.shape.group
        if self._kept and view.shares_above_all and self._kept_from(record):
            return False
        cap = None if group is None else view.caps.get(group)
        if cap is not None and group is not None and self._held_by_group(group) + record.shape.gpus > cap:
            return False
        if user is None or not view.limits:
            return True
        limits, held = view.limits_of(user), self._held_by(user)
        within_jobs = limits.jobs is None or held[0] < limits.jobs
        return within_jobs and (limits.gpus is None or held[1] + record.shape.gpus <= limits.gpus)

    def place_alone(self, record: JobView) -> tuple[tuple[GpuId, ...], Size] | None:
        """Return the most consolidated free GPUs and the largest sub-batch that fits; None: it cannot start alone."""
        shape = record.shape
        if shape.gpus > self.free_count or not self.may_start(record):
            return None
        if self._kept and shape.gpus > self.free_for(record):
            return None
        for size in shape.sizes:
            gpus = self._pick(shape.gpus, size)
            if gpus is not None:
                return gpus, size
        return None

    # ---- what policies do ------------------------------------------------------------------------------------------

    def start(self, record: JobView, why: str) -> bool:
        """Start a job alone on the most consolidated free GPUs at the largest sub-batch that fits. Return whether it
        can."""
        place = self.place_alone(record)
        if place is None:
            return False
        gpus, size = place
        self._take(gpus)
        self._enter(record, Allocation(gpus, size.accumulation), size.memory, why)
        return True

    def assign(
        self, record: JobView, gpus: Sequence[GpuId], size: Size, why: str, *, trial: JobId | None = None
    ) -> None:
        """Place a job on GPUs that the policy chose, beside their residents; `trial`: the host to try it with."""
        self._take([gpu for gpu in gpus if not self.jobs_on(gpu)])
        self._enter(record, Allocation(tuple(gpus), size.accumulation), size.memory, why, trial)

    def start_up(self, record: JobView, gpus: Sequence[GpuId], size: Size, why: str) -> None:
        """Let a job start up beside the residents of these GPUs, without a turn to compute so far."""
        self._take([gpu for gpu in gpus if not self.jobs_on(gpu)])
        self._enter(record, Allocation(tuple(gpus), size.accumulation, active=False), size.memory, why)

    def hold(self, gpus: Sequence[GpuId]) -> None:
        """Keep free GPUs out of this draft: a pending job waits for more of them."""
        self._take(gpus)

    def release(self, gpus: Sequence[GpuId]) -> None:
        """Let free GPUs be used that were held."""
        self._own_free_gpus().give(gpus)
        self.free_count += len(gpus)

    def stop(self, record: JobView, why: str) -> None:
        """Preempt a running job; the draft can give its GPUs to other jobs."""
        self._forget(record.gpus)
        self._stopped.add(record.seq)
        self._inactive.add(record.seq)
        self._note_room(record.gpus)
        emptied = [gpu for gpu in record.gpus if not self.jobs_on(gpu)]
        self._own_free_gpus().give(emptied)
        self.free_count += sum([not self.view.topology.is_closed(gpu) for gpu in emptied])
        if record.shape.user is not None:
            self._count_for_tenants(record, -1)
        self.decisions.append(Decision(record.job.id, None, why))

    def pause(self, record: JobView, why: str, *, swapped: bool = False, trial: JobId | None = None) -> None:
        """Let a running job keep its place and stop computing; `swapped`: it gives up its memory, too.

        `trial`: the job that it is tried with, for a pause that is part of their trial.
        """
        if swapped:
            self._memory[record.seq] = 0
        allocation = Allocation(record.gpus, record.accumulation, record.batch, False, swapped)
        self._switch(record, allocation, why, trial)

    def resume(self, record: JobView, why: str, *, trial: JobId | None = None) -> None:
        """Let a paused job compute again; `trial` as in `pause`."""
        if record.swapped:
            self._memory[record.seq] = self.view.perf.memory(record.job, record.accumulation)
        self._switch(record, Allocation(record.gpus, record.accumulation, record.batch), why, trial)

    def move(self, record: JobView, gpus: Sequence[GpuId], size: Size, why: str) -> None:
        """Stop a job, and start it again on free GPUs."""
        self.stop(record, why)
        self.decisions.pop()
        self.assign(record, gpus, size, why)

    def _switch(self, record: JobView, allocation: Allocation, why: str, trial: JobId | None) -> None:
        self._forget(record.gpus)
        self._switched[record.seq] = allocation.active
        self._touched.update(dict.fromkeys(record.gpus))
        if not allocation.active:
            self._inactive.add(record.seq)
        self.decisions.append(Decision(record.job.id, allocation, why, trial))

    def _enter(
        self, record: JobView, allocation: Allocation, memory: int, why: str, trial: JobId | None = None
    ) -> None:
        resident = Resident(record, allocation.accumulation, memory, None, allocation.active)
        if self._residents:
            self._forget(allocation.gpus)
        arrived, touched = self._arrived, self._touched
        for gpu in allocation.gpus:
            touched[gpu] = None
            if gpu in arrived:
                arrived[gpu].append(resident)
            else:
                arrived[gpu] = [resident]
        self._note_room(allocation.gpus)
        if record.shape.user is not None:
            self._count_for_tenants(record, 1)
        if not allocation.active:
            self._inactive.add(record.seq)
        self._placed[record.job.id] = allocation.gpus
        if self._kept and record.shape in self._kept:
            job, number = self._kept.pop(record.shape)
            if number > 1:
                self._kept[record.shape] = job, number - 1
        self.decisions.append(Decision(record.job.id, allocation, why, trial))

    def _note_room(self, gpus: Sequence[GpuId]) -> None:
        """Note whether these GPUs, which changed, have room for one more job; not before `shareable` is first asked."""
        if self._shareable is None:
            self._changed += gpus
            return
        for gpu in gpus:
            bit = 1 << gpu
            room = 0 < len(self.jobs_on(gpu)) < self._most_jobs and not self.view.topology.is_closed(gpu)
            self._shareable = self._shareable | bit if room else self._shareable & ~bit

    def _take(self, gpus: Sequence[GpuId]) -> None:
        self._just_taken += gpus
        self.free_count -= len(gpus)

    def _pick(self, count: int, size: Size) -> tuple[GpuId, ...] | None:
        """Return the most consolidated free GPUs on which the size fits; None: there are not enough."""
        topology, free = self.view.topology, self._free_gpus()
        if topology.taken:
            rest = free.copy()
            rest.take(topology.gpus_below(size.memory))
            free = rest
        return free.pick(count, topology.with_memory(size.memory))

    def _free_gpus(self) -> FreeGpusView:
        """Return the free GPUs in the draft. Most plans pick once, so nothing is copied before the second time."""
        if self._just_taken:
            return self._own_free_gpus()
        return self._free or self.view.free

    def _own_free_gpus(self) -> FreeGpus:
        if self._free is None:
            self._free = self.view.free.copy()
        self._free.take(self._just_taken)
        self._just_taken.clear()
        return self._free

    def _held_by(self, user: str) -> list[int]:
        held = self._held.get(user)
        if held is None:
            held = self._held[user] = list(self.view.held_by(user))
        return held

    def _held_by_group(self, group: str) -> int:
        held = self._held_by_groups.get(group)
        return self.view.held_by_group(group) if held is None else held

    def _count_for_tenants(self, record: JobView, sign: int) -> None:
        """Count a job for its user and its group, where their limits, caps and shares depend on it."""
        user, group, gpus = record.shape.user, record.shape.group, sign * record.shape.gpus
        self._kept_gpus = None
        if user is not None and self.view.limits:
            held = self._held_by(user)
            held[0] += sign
            held[1] += gpus
        if group is not None:
            self._held_by_groups[group] = self._held_by_group(group) + gpus
