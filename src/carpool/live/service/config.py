"""What an operator chooses for a service: `carpool serve` fills it in, `open_service` reads it."""

from dataclasses import dataclass, field

from carpool.core.perf import PerformanceModel
from carpool.core.state import RESIDENT_PER_GPU
from carpool.live.clock import Clock, RealClock
from carpool.live.executors.base import Executor, ExecutorOptions
from carpool.live.executors.registry import check_executor
from carpool.live.home import Home
from carpool.live.journal.reader import JournalPlace
from carpool.live.service.notices import NoticeSettings
from carpool.live.service.retention import RetentionLimits
from carpool.live.service.snapshot_quota import MOST
from carpool.live.spec import MAX_GRACE_S


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The operator's choices. Raises `InputError` for an executor that does not exist."""

    home: Home
    policy: str = "sjf-bsbf"
    executor: str | Executor = "local"
    """Name of an executor, with settings if it takes any, or an executor that exists already."""
    gpus: int | None = None
    """Number of logical slots; None: the GPUs that exist. The number must stay the same while the home is used."""
    only: tuple[str, ...] = ()
    """UUIDs of the GPUs to use; empty: all."""
    gpu_memory: int | None = None
    """Bytes of memory to assume on each GPU; None: as much as there is."""
    mps: bool = True
    """Whether jobs may share by MPS."""
    emulated: str = ""
    """File that describes emulated GPUs; empty: none."""
    jobs_per_gpu: int = 2
    """Number of jobs that may compute on a GPU."""
    resident_per_gpu: int = RESIDENT_PER_GPU
    """Number of jobs that may be on a GPU, paused ones included."""
    pause_patience_s: float = 600.0
    """Seconds without a service after which a paused job goes on."""
    gang_pause_s: float = 240.0
    """Seconds that a job of several GPUs without the training library may be paused."""
    max_grace_s: float = MAX_GRACE_S
    """Longest time that a job may ask for to save and to leave."""
    max_snapshots: int = MOST
    """Bytes of the code snapshots of each user's jobs that have not ended."""
    clock: Clock = field(default_factory=RealClock)
    perf: PerformanceModel | None = None
    """A performance model that does not learn; None: the belief that starts from the profile."""
    profile: str | None = None
    """Shipped name or file of the profile; None: the one for the GPU found, else t4."""
    retention: RetentionLimits = field(default_factory=RetentionLimits)
    database: JournalPlace | None = None
    """Where the journal is; None: in a SQLite file in the home."""
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    """What notices to users may do."""
    machine_is_gone: bool = False
    """Whether the machine on which the journal's jobs ran will not come back with them running."""

    def __post_init__(self) -> None:
        if isinstance(self.executor, str):
            check_executor(self.executor)

    @property
    def runs_here(self) -> bool:
        """Whether jobs are processes of this machine."""
        return isinstance(self.executor, str) and self.executor.partition(":")[0] == "local"

    @property
    def executor_options(self) -> ExecutorOptions:
        return ExecutorOptions(
            self.home,
            self.gpus,
            tuple(self.only),
            self.gpu_memory,
            self.mps,
            self.emulated,
            pause_patience_s=self.pause_patience_s,
            gang_pause_s=self.gang_pause_s,
        )
