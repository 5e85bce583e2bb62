"""TensorBoard event files, written with TensorBoard's own writer; needs neither torch nor TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import time as now

from .tracker import Tracker


class TensorboardLog(Tracker):
    """Scalars by step. A resumed run adds a file to the same folder, which TensorBoard joins.

    Args:
        folder: folder of the event files.
        config: YAML that is shown as text.
        first: whether the run begins, so that the config is written.
    """

    def __init__(self, folder: Path, config: str, *, first: bool) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(mode=0o700, exist_ok=True)
        self._writer = EventFileWriter(str(folder), max_queue_size=1000)
        if first:
            self._write_text("config", f"```yaml\n{config}\n```", 0, now())

    def log(self, row: int, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """One event with all scalars."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = Event(wall_time=time, step=step, summary=Summary(value=values))
        self._writer.add_event(event)

    def alarm(self, step: int, time: float, text: str) -> None:
        """Writes a text at its step, under the tag ``alarm``."""
        self._write_text("alarm", text, step, time)

    def _write_text(self, tag: str, text: str, step: int, moment: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        value = Summary.Value(
            tag=tag,
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(
                dtype=DT_STRING,
                string_val=[text.encode()],
                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            ),
        )
        summary = Summary(value=[value])
        self._writer.add_event(Event(wall_time=moment, step=step, summary=summary))

    def flush(self) -> None:
        """Writes queued events."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
