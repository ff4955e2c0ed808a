"""Refine: decode payloads into typed columns of a second table.

Rows that fit the schema go to the typed table. The others go to `<table>_rejects`, with payload and reason.
Spark types the rows (`from_json`); this package reads and writes them.

Refining is incremental and exactly once, like the ingest: the state of each of the two tables lists the
numbers that it has seen, and changes in the same commit as its rows. A crash between the two commits leaves
one table ahead, and the next run first brings the other one up to date. Two runs at once add nothing twice: a
commit succeeds only on top of the state that it was planned from; otherwise it raises `CommitConflict`, and
its files are deleted. Only data files added since the last run are read, or all files if numbers are missing
there because another engine has compacted the table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyspark

from bridge.ingest.columns import BASE, has_variant, is_variant
from bridge.ingest.errors import BadOption, CommitConflict, IngestError
from bridge.ingest.files import DataFile
from bridge.ingest.payloads import KEYS, column_names, infer
from bridge.ingest.planner import StreamId, grouped
from bridge.ingest.ranges import Ranges
from bridge.ingest.refine_worker import READ, Fresh, pack_fresh, reading, writing
from bridge.ingest.session import arrow_schema
from bridge.ingest.sinks.base import LiveFile, Sink, described, discard, labelled, sweep, sweep_on_error
from bridge.ingest.state import StateStore, TableState, load_state
from bridge.ingest.worker import collected, numbered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

SAMPLE = 1000  # payloads from which a schema is inferred
SAMPLE_TEXT = 64 << 10  # characters of a payload: the sample is held by the driver
TASK_BYTES = 64 << 20  # of data files that one task reads
ROUND_BYTES = 4 << 30
MISFIT = "_misfit"
VARIANT = "value VARIANT"  # the meaning of --schema variant: this column has the whole payload


@dataclass(slots=True)
class Refined:
    """The result of one run."""

    rows: int = 0
    rejected: int = 0
    files: int = 0
    rounds: int = 0
    schema: str = ""


@dataclass(slots=True)
class Output:
    """One of the two tables, and the state that this run plans from: the last that it read or committed."""

    sink: Sink
    state: TableState


Outputs = dict[str, Output]


@dataclass(slots=True)
class Refinement:
    """A table of messages to refine: its streams (none: all), the format of payloads, and the schema.

    The schema is DDL, "infer", or "variant": the whole payload in one column of Spark's VARIANT.
    """

    spark: SparkSession
    messages: Sink
    make: Callable[[str, pa.Schema], Sink]  # opens the table "typed" or "rejects" with these columns
    form: str = "json"
    schema: str = "infer"
    streams: Collection[str] = ()
    done: Refined = field(default_factory=Refined)

    def run(self) -> Refined:
        """Refine all messages that the typed table does not have yet.

        Raises BadOption for the schema, IngestError if numbers are in no data file or rows were deleted, and
        CommitConflict if another run commits at the same time.
        """
        source = load_state(self.messages)
        wanted = {
            name: state.covered
            for name, state in source.streams.items()
            if state.covered and (not self.streams or name.stream in self.streams)
        }
        files = self.messages.files()
        if not wanted or not files:
            return self.done
        keys = BASE.remove(BASE.get_field_index("payload"))
        rejects = self.make("rejects", pa.schema([*keys, ("payload", pa.binary()), ("reason", pa.string())]))
        ddl = self._schema(wanted, files, keys)
        self.done.schema = ddl
        types = _renamed(_parsed(self.spark, ddl))
        columns = arrow_schema(types)
        if any(has_variant(column.type) and not is_variant(column.type) for column in columns):
            raise BadOption(f"--schema {ddl}: VARIANT can be a whole column, but not part of one")
        typed = self.make("typed", pa.schema([*keys, *columns]))
        _same_types(ddl, typed)
        typed.add_columns({column.name: column.type for column in columns})
        outputs = {
            kind: Output(sink, load_state(sink)) for kind, sink in (("rejects", rejects), ("typed", typed))
        }
        fresh = {kind: _fresh(wanted, output.state) for kind, output in outputs.items()}
        if fresh["typed"] != fresh["rejects"]:  # a crash between two commits
            for kind, output in outputs.items():
                self._all(types, {kind: output}, fresh[kind], files)
        else:
            self._all(types, outputs, fresh["typed"], files)
        return self.done

    def _schema(self, wanted: Fresh, files: Sequence[LiveFile], keys: pa.Schema) -> str:
        if self.schema == "variant":
            version = self.spark.version
            if min(int(each.split(".")[0]) for each in (version, pyspark.__version__)) < 4:
                raise BadOption(
                    f"--schema variant: Spark {version} has no VARIANT, it needs Spark 4.0 or newer"
                )
            return VARIANT
        if self.schema != "infer":
            return self.schema
        from pyspark.sql import functions as f

        known = load_state(self.make("typed", keys)).notes.get("schema")
        if known:
            return known
        frame = self._read([[file.path] for file in files[:8]], wanted)
        short = frame.select("text").where(f.length("text") <= SAMPLE_TEXT)
        ddl = infer(row.text for row in short.limit(SAMPLE).collect())
        if not ddl:
            raise BadOption(
                "no payload is a JSON object with keys, so no schema can be inferred: give --schema"
            )
        return ddl

    def _all(self, types: StructType, outputs: Outputs, fresh: Fresh, files: Sequence[LiveFile]) -> None:
        """Run rounds until no number is fresh: first over files added since the last run, then over all."""
        done = min(int(output.state.notes.get("added", "-1")) for output in outputs.values())
        newest = max(file.added for file in files)
        new = [file for file in files if file.added > done]
        for candidates in (new, list(files)):
            for group in grouped(candidates, _size, ROUND_BYTES):
                if not any(fresh.values()):
                    return
                last = group[-1] is candidates[-1]
                self._round(types, outputs, fresh, group, newest if last else done)
        if any(fresh.values()):
            stream, ranges = next((stream, ranges) for stream, ranges in fresh.items() if ranges)
            raise IngestError(
                f"{self.messages.name}: its state has {stream.gateway} {stream.stream} {ranges.first}.."
                f"{ranges.last}, but no data file has these numbers; check whether rows were deleted from "
                "the table"
            )

    def _round(
        self,
        types: StructType,
        outputs: dict[str, Output],
        fresh: Fresh,
        files: Sequence[LiveFile],
        added: int,
    ) -> None:
        if changed := sum(file.has_deletes for file in files):
            raise IngestError(
                f"{self.messages.name}: another engine has deleted rows in {changed} data file(s) that still "
                "contain them, so nothing is refined; rewrite the files with that engine (Athena: OPTIMIZE, "
                "Spark: rewrite_data_files, Delta: REORG TABLE ... APPLY (PURGE)) and run again"
            )
        parts = [[file.path for file in group] for group in grouped(files, _size, TASK_BYTES)]
        frame = _typed(self._read(parts, fresh), self.done.schema, types, self.form)
        targets = {kind: labelled(output.sink.target()) for kind, output in outputs.items()}
        with sweep_on_error(*targets.values()):
            rows = collected(self.spark, f"round {self.done.rounds + 1}", frame, writing(targets))
        seen: Fresh = {}
        for gateway, stream, epoch, pairs in rows["seen"]:
            seen.setdefault(StreamId(gateway, stream, int(epoch)), Ranges()).update(pairs)
        written = {kind: [DataFile(**body) for body in rows[kind]] for kind in outputs}
        if any(body["number"] for body in rows["attempt"]):
            for kind, target in targets.items():
                sweep(target, keep=written[kind])
        notes = {"schema": self.done.schema, "added": str(added)}
        for kind in list(written):
            try:
                _commit(outputs[kind], seen, written[kind], notes)
            except CommitConflict:
                for rest, unused in written.items():
                    discard(outputs[rest].sink, unused)
                raise
            files_of = written.pop(kind)
            count = sum(file.rows for file in files_of)
            self.done.files += len(files_of)
            if kind == "typed":
                self.done.rows += count
            else:
                self.done.rejected += count
        self.done.rounds += 1
        for name, ranges in seen.items():
            fresh[name] = Ranges(hole for pair in fresh[name] for hole in ranges.missing(*pair))

    def _read(self, parts: list[list[str]], fresh: Fresh) -> DataFrame:
        work = reading(parts, self.messages.target(), pack_fresh(fresh), self.form)
        return numbered(self.spark, parts).mapInArrow(work, READ)


def _parsed(spark: SparkSession, ddl: str) -> StructType:
    """Return the schema as Spark reads it; raises BadOption."""
    from pyspark.errors import PySparkException

    try:
        return spark.createDataFrame([], ddl).schema
    except PySparkException as error:
        line = " ".join(str(error).split())[:200]
        raise BadOption(f"--schema {ddl}: Spark cannot read it ({line})") from None


def _same_types(ddl: str, typed: Sink) -> None:
    """Raise BadOption if the typed table has a column of the schema with another type."""
    for wanted, found in typed.differences():
        if found is not None:
            raise BadOption(
                f"--schema {ddl}: it has the column {described(wanted)}, but {typed.name} has "
                f"{described(found)} from an earlier run; use that type, or refine --to another table"
            )


def _typed(frame: DataFrame, ddl: str, types: StructType, form: str) -> DataFrame:
    """Type the text; the column `fits` says whether all of it could be typed."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField, StructType

    if ddl == VARIANT:
        value = f.try_parse_json("text")
        reason = f.lit("not JSON" if form == "json" else "not CBOR")
        return frame.select(
            *KEYS, "payload", reason.alias("reason"), value.isNotNull().alias("fits"), value.alias("value")
        )
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": MISFIT}
    # a cast goes by position: it gives the columns their names in the table, which are unique
    named = StructType([*types, StructField(MISFIT, StringType())])
    payload = f.from_json("text", f"{ddl}, `{MISFIT}` STRING", options).cast(named)
    parsed = frame.withColumn("parsed", payload)
    is_object = f.col("text").isNotNull() & f.ltrim("text").startswith("{")
    fits = is_object & f.col("parsed").isNotNull() & f.col(f"parsed.{MISFIT}").isNull()
    reason = f.when(is_object, "does not fit the schema").otherwise("not an object")
    return parsed.select(
        *KEYS,
        "payload",
        reason.alias("reason"),
        f.coalesce(fits, f.lit(False)).alias("fits"),
        *(f.col(f"parsed.`{name}`") for name in types.names),
    )


def _fresh(wanted: Fresh, state: TableState) -> Fresh:
    known = state.covered()
    return {
        name: Ranges(hole for pair in ranges for hole in known.get(name, Ranges()).missing(*pair))
        for name, ranges in wanted.items()
    }


def _commit(output: Output, seen: Fresh, files: Sequence[DataFile], notes: dict[str, str]) -> None:
    """Commit on top of the state that was planned from; raises CommitConflict if the table has another."""
    sink, state = output.sink, output.state
    states = StateStore(sink.state())
    for name, ranges in seen.items():
        state.of(name).covered.update(ranges)
    state.notes |= notes
    version = states.save(state, state.version)
    sink.commit(state.version, version, files)
    state.version = version
    states.prune(version)


def _size(file: LiveFile) -> int:
    return file.size


def _renamed(schema: StructType) -> StructType:
    """Return the fields of the payload under their column names in the table."""
    from pyspark.sql.types import StructField, StructType

    names = column_names(schema.names)
    return StructType([StructField(names[column.name], column.dataType) for column in schema])
