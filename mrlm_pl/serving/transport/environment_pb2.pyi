from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("environment", "settings")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    environment: str
    settings: bytes
    def __init__(self, environment: _Optional[str] = ..., settings: _Optional[bytes] = ...) -> None: ...

class EnvironmentDescription(_message.Message):
    __slots__ = ("name", "agents", "summary")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    name: str
    agents: _containers.RepeatedScalarFieldContainer[str]
    summary: str
    def __init__(self, name: _Optional[str] = ..., agents: _Optional[_Iterable[str]] = ..., summary: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("environments",)
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentDescription]
    def __init__(self, environments: _Optional[_Iterable[_Union[EnvironmentDescription, _Mapping]]] = ...) -> None: ...

class TasksRequest(_message.Message):
    __slots__ = ("environment", "settings", "split", "start", "count", "identities")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    environment: str
    settings: bytes
    split: str
    start: int
    count: int
    identities: bool
    def __init__(self, environment: _Optional[str] = ..., settings: _Optional[bytes] = ..., split: _Optional[str] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., identities: _Optional[bool] = ...) -> None: ...

class TasksReply(_message.Message):
    __slots__ = ("tasks", "size", "identities")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    tasks: bytes
    size: int
    identities: bytes
    def __init__(self, tasks: _Optional[bytes] = ..., size: _Optional[int] = ..., identities: _Optional[bytes] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("environment", "settings", "task", "client", "key", "lease_seconds")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    environment: str
    settings: bytes
    task: bytes
    client: str
    key: str
    lease_seconds: float
    def __init__(self, environment: _Optional[str] = ..., settings: _Optional[bytes] = ..., task: _Optional[bytes] = ..., client: _Optional[str] = ..., key: _Optional[str] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("session", "lease_seconds", "observations", "tools", "direct", "settings")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    session: str
    lease_seconds: float
    observations: bytes
    tools: bytes
    direct: str
    settings: str
    def __init__(self, session: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., observations: _Optional[bytes] = ..., tools: _Optional[bytes] = ..., direct: _Optional[str] = ..., settings: _Optional[str] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session", "turn", "actions")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    session: str
    turn: int
    actions: bytes
    def __init__(self, session: _Optional[str] = ..., turn: _Optional[int] = ..., actions: _Optional[bytes] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("session", "turn", "step")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session: str
    turn: int
    step: bytes
    def __init__(self, session: _Optional[str] = ..., turn: _Optional[int] = ..., step: _Optional[bytes] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepAliveReply(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("environment", "limit")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    limit: int
    def __init__(self, environment: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class SessionDescription(_message.Message):
    __slots__ = ("session", "environment", "client", "turn", "age_seconds", "lease_left_seconds", "busy")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    session: str
    environment: str
    client: str
    turn: int
    age_seconds: float
    lease_left_seconds: float
    busy: bool
    def __init__(self, session: _Optional[str] = ..., environment: _Optional[str] = ..., client: _Optional[str] = ..., turn: _Optional[int] = ..., age_seconds: _Optional[float] = ..., lease_left_seconds: _Optional[float] = ..., busy: _Optional[bool] = ...) -> None: ...

class ListSessionsReply(_message.Message):
    __slots__ = ("sessions", "total")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionDescription]
    total: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionDescription, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("worker", "address", "environments", "sessions", "capacity", "waiting", "draining")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    worker: str
    address: str
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentDescription]
    sessions: int
    capacity: int
    waiting: int
    draining: bool
    def __init__(self, worker: _Optional[str] = ..., address: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[EnvironmentDescription, _Mapping]]] = ..., sessions: _Optional[int] = ..., capacity: _Optional[int] = ..., waiting: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class WorkerOrder(_message.Message):
    __slots__ = ("drain",)
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    def __init__(self, drain: _Optional[bool] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("report", "silent_seconds")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    report: WorkerReport
    silent_seconds: float
    def __init__(self, report: _Optional[_Union[WorkerReport, _Mapping]] = ..., silent_seconds: _Optional[float] = ...) -> None: ...

class ListWorkersReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDescription]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerDescription, _Mapping]]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("token_ids", "policy", "seed", "sampling", "stop_ids", "session", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    policy: str
    seed: str
    sampling: Sampling
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    session: str
    weights: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., policy: _Optional[str] = ..., seed: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., session: _Optional[str] = ..., weights: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "version", "engine")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: str
    version: int
    engine: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[str] = ..., version: _Optional[int] = ..., engine: _Optional[str] = ...) -> None: ...

class SampleBatch(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[SampleRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[SampleRequest, _Mapping]]] = ...) -> None: ...

class SampleReplies(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_prefix",)
    SESSION_PREFIX_FIELD_NUMBER: _ClassVar[int]
    session_prefix: str
    def __init__(self, session_prefix: _Optional[str] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribePoliciesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PolicyDescription(_message.Message):
    __slots__ = ("name", "model", "version", "vocabulary", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    version: int
    vocabulary: str
    weights: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[int] = ..., vocabulary: _Optional[str] = ..., weights: _Optional[str] = ...) -> None: ...

class DescribePoliciesReply(_message.Message):
    __slots__ = ("policies",)
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[PolicyDescription]
    def __init__(self, policies: _Optional[_Iterable[_Union[PolicyDescription, _Mapping]]] = ...) -> None: ...
