from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Conversation(_message.Message):
    __slots__ = ("id", "messages")
    ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    id: int
    messages: bytes
    def __init__(self, id: _Optional[int] = ..., messages: _Optional[bytes] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("conversations",)
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    conversations: _containers.RepeatedCompositeFieldContainer[Conversation]
    def __init__(self, conversations: _Optional[_Iterable[_Union[Conversation, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("id", "probability", "truncated")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    id: int
    probability: float
    truncated: bool
    def __init__(self, id: _Optional[int] = ..., probability: _Optional[float] = ..., truncated: _Optional[bool] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("scores", "model")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    model: str
    def __init__(self, scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ..., model: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("model", "max_conversations", "max_characters")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    max_conversations: int
    max_characters: int
    def __init__(self, model: _Optional[str] = ..., max_conversations: _Optional[int] = ..., max_characters: _Optional[int] = ...) -> None: ...
