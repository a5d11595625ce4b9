"""What goes out: frames cut to size, and kept back while a window of the peer's is shut."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from extproc.serve.fastlane import frames
from extproc.serve.fastlane.frames import (
    DEFAULT_WINDOW,
    HEAD,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    ConnectionBroken,
    ErrorCode,
    StreamFault,
)
from extproc.serve.fastlane.streams import Piece, Stream


class Sender:
    """The sending side of one connection.

    `out` is what is ready for the network, `window` what the connection may send, `held` how many
    bytes wait for a window. `drained` is told of a stream that has nothing left to send and may
    send more, `ended` of one whose end is on its way.
    """

    __slots__ = (
        "_drained",
        "_ended",
        "_waiting",
        "frame_bytes",
        "held",
        "initial_window",
        "out",
        "window",
    )

    def __init__(
        self, *, drained: Callable[[Stream], None], ended: Callable[[Stream], None]
    ) -> None:
        self.out: list[bytes] = []
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.frame_bytes = MIN_FRAME_BYTES
        self.held = 0
        self._drained = drained
        self._ended = ended
        self._waiting: OrderedDict[int, Stream] = OrderedDict()

    def headers(self, stream: Stream, block: bytes, *, ends: bool = False) -> None:
        """The header block goes out after all that was sent before."""
        if stream.queue is not None:
            stream.queue.append(Piece(block, is_block=True, ends=ends))
            return
        self._put_block(stream.id, block, ends=ends)
        if ends:
            self._ended(stream)

    def data(self, stream: Stream, payload: bytes, *, ends: bool = False) -> None:
        """`payload` goes out, as far as windows allow; the rest waits for them."""
        size = len(payload)
        if (
            stream.queue is None
            and size <= self.frame_bytes
            and size <= stream.window
            and size <= self.window
        ):
            self.window -= size
            stream.window -= size
            self.out.append(HEAD.pack(size << 8, ends, stream.id))
            self.out.append(payload)
            if ends:
                self._ended(stream)
            return
        is_first = stream.queue is None
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append(Piece(payload, is_block=False, ends=ends))
        self.held += size
        if is_first:
            self._push(stream, is_news=False)

    def drop(self, stream: Stream) -> None:
        """What waits to be sent on the stream is not sent any more."""
        if stream.queue is not None:
            self.held -= sum(
                len(piece.payload) - piece.offset for piece in stream.queue if not piece.is_block
            )
            stream.queue = None
            self._waiting.pop(stream.id, None)

    def grow(self, by: int) -> None:
        """The connection may send more.

        Raises:
            ConnectionBroken: the window would be larger than there are.
        """
        self.window += by
        if self.window > MAX_WINDOW:
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "too large a window")
        while self._waiting and self.window > 0:
            self._push(self._waiting.popitem(last=False)[1])

    def grow_stream(self, stream: Stream, by: int) -> None:
        """The stream may send more.

        Raises:
            StreamFault: the window would be larger than there are.
        """
        stream.window += by
        if stream.window > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "too large a window")
        self._push(stream)

    def resize(self, initial_window: int, streams: Iterable[Stream]) -> None:
        """Every stream has the new initial window instead of the old one, and uses it at `push`.

        Raises:
            ConnectionBroken: a window would be larger than there are.
        """
        grown_by = initial_window - self.initial_window
        self.initial_window = initial_window
        for stream in streams:
            stream.window += grown_by
            if stream.window > MAX_WINDOW:
                raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, "too large a window")

    def push(self, streams: Iterable[Stream]) -> None:
        """Every stream has sent what it may."""
        for stream in streams:
            if stream.queue is not None:
                self._push(stream)

    def _push(self, stream: Stream, *, is_news: bool = True) -> None:
        """The stream has sent what it may; `is_news`: whoever sends is told when that was all."""
        queue = stream.queue
        if queue is None:
            return
        while queue:
            piece = queue[0]
            if piece.is_block:
                self._put_block(stream.id, piece.payload, ends=piece.ends)
            elif not self._put_data(stream, piece):
                return
            queue.popleft()
            if piece.ends:
                stream.queue = None
                self._ended(stream)
                return
        stream.queue = None
        if is_news:
            self._drained(stream)

    def _put_data(self, stream: Stream, piece: Piece) -> bool:
        """Whether all of `piece` is out."""
        total = len(piece.payload)
        while True:
            left = total - piece.offset
            size = max(0, min(left, stream.window, self.window, self.frame_bytes))
            if left and not size:
                if stream.window > 0:
                    self._waiting[stream.id] = stream
                return False
            is_last = size == left
            self.out.append(HEAD.pack(size << 8, is_last and piece.ends, stream.id))
            self.out.append(piece.payload[piece.offset : piece.offset + size])
            piece.offset += size
            self.held -= size
            self.window -= size
            stream.window -= size
            if is_last:
                return True

    def _put_block(self, stream_id: int, block: bytes, *, ends: bool) -> None:
        """The block is out, in as many frames as it takes."""
        kind, flags = frames.HEADERS, frames.END_STREAM if ends else 0
        limit = self.frame_bytes
        while len(block) > limit:
            self.out.append(frames.frame(kind, flags, stream_id, block[:limit]))
            block, kind, flags = block[limit:], frames.CONTINUATION, 0
        self.out.append(frames.frame(kind, flags | frames.END_HEADERS, stream_id, block))
