"""Refine: decode payloads into typed columns of a second table.

What it promises: each row of the table of messages (of the streams and topics that are refined) ends as
exactly one row of the typed table, or as one of `<table>_rejects` with its payload and the reason. No value
becomes null silently.

**Rows.** A payload is a row if it is an object, or a single number, string or boolean, which counts as
`{"value": ...}`. Anything else is a reject: no JSON (or CBOR), an object with a key twice, too large, too
deep.

**Columns.** A given schema is strict: a value that does not fit makes its row a reject, so the columns are
exactly those that the user asked for. An inferred schema adapts: such a value goes to a wider column next to
that of its key, `<column>_double`, `<column>_bigint` or `<column>_text`, the first that can store it exactly.
The choice depends only on the value and the column's type. So the order of messages decides only which types
`infer` finds in the first messages, and whether a wider column exists. A table gets at most `MAX_WIDER` of
these. `schema` defines types and names, `typed` which values a type accepts.

**Keys without a column** are kept: the column `extra` has them as one JSON object. It also has the whole
value of a key if an object in it has keys that the column's type lacks, or if the table has no room for a
wider column. The result counts the rows with `extra`, and names the keys.

**Rejects** show in the result: new ones by reason, and all that the table of rejects has. The command exits
with 4 as long as it has any. With `replay`, they are typed again, by the current rules; those that fit move
to the typed table. The others keep their first reason.

**Exactly once.** The state of each of the two tables lists the numbers that it has seen, and changes in the
same commit as its rows. A crash between the two commits leaves one table ahead. The next run first brings the
other one up to date, by the rules of the crashed run, which are in the state too. Two concurrent runs add
nothing twice: a commit succeeds only on top of the state from which it was planned; otherwise it raises
`CommitConflict`, and its files are deleted. Only data files added since the last run are read, or all files
if numbers are missing there because another engine has compacted the table.

The steps have this order, so that the next run can repair a kill at any point:

1. The schema and the names of columns go to the state of the typed table, then the columns are added.
2. A round: the tasks write files; the rejects are committed, then the typed rows. If the tasks meet values
   for wider columns that the table lacks, their files are deleted, the columns added, and the round runs
   again.
3. A replay: the typed rows are committed with a mark in the state that rejects are to be removed. `_settle`
   rewrites the rejects without rows that the typed table has, and a third commit removes the mark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark

from bridge.ingest.columns import BASE, IDENTITY, has_variant, is_variant
from bridge.ingest.errors import BadOption, CommitConflict, IngestError
from bridge.ingest.files import DataFile, Target, labelled, sweep, sweep_on_error
from bridge.ingest.numbers import within
from bridge.ingest.planner import StreamId, grouped
from bridge.ingest.refine_worker import (
    REJECTS,
    SAMPLE,
    Fresh,
    Input,
    pack_fresh,
    reading,
    refining,
    sampling,
    typed_schema,
    typing,
    writing,
)
from bridge.ingest.schema import RESERVED, Layout, infer
from bridge.ingest.session import arrow_schema, spark_schema
from bridge.ingest.sinks.base import LiveFile, Sink, described, discard, tidied
from bridge.ingest.state import StateStore, TableState, load_state
from bridge.ingest.tasks import SparkTasks
from bridge.ingest.topicpattern import TopicPattern
from bridge.ingest.typed import NAMED, WIDER, Rules, converter
from bridge.ingest.worker import Function, collected, numbered
from bridge.objectkeys import MAX_SEQUENCE
from bridge.ranges import Pair, Ranges, size

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

SAMPLED = 8  # data files that a sample is taken from
TASK_BYTES = 64 << 20  # of data files that one task reads
ROUND_BYTES = 4 << 30
WHOLE = "value VARIANT"  # the meaning of --schema variant: this column has the whole payload
KEYED = BASE.remove(BASE.get_field_index("payload"))  # what each typed row has beside its values
ROW = IDENTITY.names[:4]  # the columns that identify a row: gateway, stream, epoch, sequence_number
REPLAY = "replay"  # the mark of an unfinished replay: "<newest file of the typed table before>:<rows>"


@dataclass(slots=True)
class Refined:
    """The result of one run.

    `rows` and `rejected` are those of new messages, `replayed` the rejects that are typed rows now. `rejects`
    is how many the table of rejects has. `reasons` counts the new rejects, `extra` the rows by the keys that
    have no column (at most 100 keys; nested ones as `key.name`), `extra_rows` all such rows. `problems` say
    why small files were not merged.
    """

    rows: int = 0
    rejected: int = 0
    replayed: int = 0
    rejects: int = 0
    files: int = 0
    rounds: int = 0
    schema: str = ""
    reasons: Counter[str] = field(default_factory=Counter)
    extra_rows: int = 0
    extra: Counter[str] = field(default_factory=Counter)
    added_columns: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the document of `--json`; `asdict` of Python 3.11 cannot copy a Counter."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}


@dataclass(slots=True)
class Output:
    """One of the two tables, and the state that this run plans from: the last that it read or committed."""

    sink: Sink
    state: TableState


Outputs = dict[str, Output]
LeftOut = dict[StreamId, dict[int, int]]  # how many numbers, by chunk
Absent = Sequence[tuple[StreamId, int, list[Pair]]]  # numbers without a row, with their chunk


def behind(messages: Sink, make: Callable[[str, pa.Schema], Sink], streams: Collection[str] = ()) -> bool:
    """Return whether there are messages to refine, or a replay to finish. `make` is that of `Refinement`."""
    states = [load_state(make(kind, columns)) for kind, columns in (("typed", KEYED), ("rejects", REJECTS))]
    wanted = _wanted(load_state(messages), streams)
    return bool(states[0].notes.get(REPLAY)) or any(any(_fresh(wanted, one).values()) for one in states)


@dataclass(slots=True)
class Refinement:
    """A table of messages to refine: its streams (none: all), the format of payloads, and the schema.

    The schema is DDL, "infer", or "variant": the whole payload in one column of Spark's VARIANT. `topic` is a
    topic pattern; without one, all topics are refined, or those of earlier runs.
    """

    spark: SparkSession
    messages: Sink
    make: Callable[[str, pa.Schema], Sink]  # opens the table "typed" or "rejects" with these columns
    form: str = "json"
    schema: str = "infer"
    streams: Collection[str] = ()
    topic: str = ""
    replay: bool = False
    done: Refined = field(default_factory=Refined)
    _pattern: TopicPattern = field(init=False)

    def run(self) -> Refined:
        """Refine all messages that the typed table does not have yet.

        Raises BadOption for the schema and the topic, IngestError if numbers are in no data file or rows were
        deleted, and CommitConflict if another run commits at the same time.
        """
        promised = load_state(self.messages)
        wanted = _wanted(promised, self.streams)
        files = self.messages.files()
        if not wanted or not files:
            return self.done
        rejects, bare = self.make("rejects", REJECTS), self.make("typed", KEYED)
        outputs = {"rejects": Output(rejects, load_state(rejects)), "typed": Output(bare, load_state(bare))}
        before = {kind: dict(output.state.notes) for kind, output in outputs.items()}
        layout = self._layout(before["typed"])
        ddl = self._schema(wanted, files, before["typed"])
        self.done.schema = ddl
        rules = self._rules(ddl, layout, strict=self.schema != "infer", form=self.form)
        columns = pa.schema([*((name, pa.string()) for name in self._pattern.names), *rules.columns()])
        typed = self.make("typed", pa.schema([*KEYED, *columns]))
        _same_types(ddl, typed)
        if any(before["typed"].get(name) != _notes(rules)[name] for name in ("schema", "layout")):
            _commit(outputs["typed"], {}, [], _notes(rules))  # first: a later run must not infer another one
        typed.add_columns({column.name: column.type for column in columns})
        outputs["typed"].sink = typed
        self._settle(outputs)
        fresh = {kind: _fresh(wanted, output.state) for kind, output in outputs.items()}
        for behind, ahead in (("typed", "rejects"), ("rejects", "typed")):
            alone = _without(fresh[behind], fresh[ahead])
            if any(alone.values()):  # a crash between two commits
                notes = before[ahead]
                same = self._rules(
                    notes.get("schema", ddl),
                    layout,
                    strict=bool(notes.get("strict")),
                    form=notes.get("form", self.form),
                )
                left = _left_out(outputs[ahead].state, outputs[behind].state)
                self._all(same, {behind: outputs[behind]}, alone, left, files)
        both = _without(fresh["typed"], _without(fresh["typed"], fresh["rejects"]))
        self._all(rules, outputs, both, _left_out(promised, outputs["typed"].state), files)
        if self.replay:
            self._replay(rules, outputs, wanted)
        for output in outputs.values():
            if problem := tidied(lambda: SparkTasks(self.spark), output.sink).problem:
                self.done.problems.append(problem)
        self.done.rejects = rejects.rows()
        return self.done

    def _layout(self, notes: dict[str, str]) -> Layout:
        layout = Layout.from_note(notes.get("layout"))
        if "layout" not in notes:
            layout.topic = self.topic
        elif self.topic and self.topic != layout.topic:
            first = f"with --topic {layout.topic}" if layout.topic else "without --topic"
            raise BadOption(
                f"--topic {self.topic}: the table was refined {first}, and messages of other topics are not "
                "read again; leave --topic out, or refine --to another table"
            )
        self._pattern = TopicPattern.parse(layout.topic, RESERVED)
        return layout

    def _schema(self, wanted: Fresh, files: Sequence[LiveFile], notes: dict[str, str]) -> str:
        if self.schema == "variant":
            version = self.spark.version
            if min(int(each.split(".")[0]) for each in (version, pyspark.__version__)) < 4:
                raise BadOption(
                    f"--schema variant: Spark {version} has no VARIANT, it needs Spark 4.0 or newer"
                )
            return WHOLE
        if self.schema != "infer":
            return self.schema
        if "schema" in notes:
            return notes["schema"]
        source = self._input([[file.path] for file in files[:SAMPLED]], self.messages, wanted)
        frame = numbered(self.spark, source.parts).mapInArrow(sampling(source, self.form), "text string")
        ddl = infer(row.text for row in frame.limit(SAMPLE).collect())
        if not ddl:
            raise BadOption(
                "no payload is a JSON object with keys, so no schema can be inferred: give --schema"
            )
        return ddl

    def _rules(self, ddl: str, layout: Layout, *, strict: bool, form: str) -> Rules:
        types = _parsed(self.spark, ddl)
        schema = arrow_schema(types)
        if any(has_variant(column.type) and not is_variant(column.type) for column in schema):
            raise BadOption(f"--schema {ddl}: VARIANT can be a whole column, but not part of one")
        layout.add(types.names, self._pattern.names)
        fields = [column.with_name(layout.columns[column.name]) for column in schema]
        for column in schema:
            converter(column.type)  # raises BadOption
        packed = pa.schema(fields).serialize().to_pybytes()
        return Rules(ddl, tuple(types.names), packed, layout, strict, form, ddl == WHOLE)

    def _all(
        self, rules: Rules, outputs: Outputs, fresh: Fresh, left: LeftOut, files: Sequence[LiveFile]
    ) -> None:
        """Run rounds until no number is fresh: first over files added since the last run, then over all.

        `left` is how many of the fresh numbers are in no file: the objects have declared them as left out.
        """
        if absent := _absent(fresh, left):
            for output in outputs.values():
                _commit(output, {}, [], {}, absent)
        done = min(int(output.state.notes.get("added", "-1")) for output in outputs.values())
        newest = max(file.added for file in files)
        new = [file for file in files if file.added > done]
        for candidates in (new, list(files)):
            for group in grouped(candidates, _size, ROUND_BYTES):
                if not any(fresh.values()):
                    return
                last = group[-1] is candidates[-1]
                self._round(rules, outputs, fresh, left, group, newest if last else done)
        if any(fresh.values()):
            stream, ranges = next((stream, ranges) for stream, ranges in fresh.items() if ranges)
            raise IngestError(
                f"{self.messages.name}: its state has {stream.gateway} {stream.stream} {ranges.first}.."
                f"{ranges.last}, but no data file has these numbers; check whether rows were deleted from "
                "the table"
            )

    def _round(
        self,
        rules: Rules,
        outputs: Outputs,
        fresh: Fresh,
        left: LeftOut,
        files: Sequence[LiveFile],
        added: int,
    ) -> None:
        source = self._input(_parts(self.messages, files), self.messages, fresh)
        rows, written = self._work(rules, outputs, source, f"round {self.done.rounds + 1}")
        seen: Fresh = {}
        for note in rows["note"]:
            for gateway, stream, epoch, pairs in note["seen"]:
                seen.setdefault(StreamId(gateway, stream, int(epoch)), Ranges()).update(pairs)
        for name, ranges in seen.items():
            fresh[name] = Ranges(hole for pair in fresh[name] for hole in ranges.missing(*pair))
        absent = _absent(fresh, left)
        # a table that is brought up to date by older rules keeps its own
        notes = {"added": str(added), **(_notes(rules) if len(outputs) > 1 else {})}
        for kind in list(written):
            try:
                _commit(outputs[kind], seen, written[kind], notes, absent)
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
                for reasons in rows["reasons"]:
                    self.done.reasons.update(reasons)
        self.done.rounds += 1

    def _work(
        self, rules: Rules, outputs: Outputs, source: Input, what: str
    ) -> tuple[dict[str, list[Any]], dict[str, list[DataFile]]]:
        """Type and write the rows, as often as the typed table lacks columns for them; commit nothing.

        Returns the tasks' status rows, and the data files for each of the outputs.
        """
        while True:
            targets = {kind: labelled(output.sink.target()) for kind, output in outputs.items()}
            with sweep_on_error(*targets.values()):
                rows = collected(self.spark, what, *self._tasks(rules, source, targets))
            typed = outputs.get("typed")
            wider = {(key, kind) for note in rows["note"] for key, kind in note["wider"]} if typed else ()
            written = {kind: [DataFile(**body) for body in rows[kind]] for kind in outputs}
            if typed is not None and wider:
                for target in targets.values():
                    sweep(target)
                self._widen(rules, typed, sorted(wider))
                continue
            if any(body["number"] for body in rows["attempt"]):
                for kind, target in targets.items():
                    sweep(target, keep=written[kind])
            if typed is not None:
                for note in rows["note"]:
                    count, keys = note["extra"]
                    self.done.extra_rows += count
                    self.done.extra.update(keys)
                self.done.extra = Counter(dict(self.done.extra.most_common(NAMED)))
            return rows, written

    def _tasks(self, rules: Rules, source: Input, targets: dict[str, Target]) -> tuple[DataFrame, Function]:
        """Return the frame and what its tasks do: all of it in one pass, or VARIANT by Spark in between."""
        frame = numbered(self.spark, source.parts)
        variants = [column.name for column in rules.types() if is_variant(column.type)]
        if not variants:
            return frame, refining(source, rules, targets)
        from pyspark.sql import functions as f

        schema = typed_schema(source, rules)
        typed = frame.mapInArrow(typing(source, rules), spark_schema(schema))
        lost = f.lit(False)
        for name in variants:
            lost = lost | (f.col(name).isNotNull() & f.try_parse_json(name).isNull())
        columns = {
            **{name: f.try_parse_json(name) for name in variants},
            "reason": f.coalesce("reason", f.when(lost, f.lit("Spark cannot make it a VARIANT"))),
        }
        return typed.select(*(columns.get(name, f.col(name)).alias(name) for name in schema.names)), writing(
            targets
        )

    def _widen(self, rules: Rules, typed: Output, wanted: Sequence[tuple[str, str]]) -> None:
        """Add columns for values of these keys and types; those for which there is no room go to `extra`."""
        taken = typed.sink.target().arrow().names
        added = {rules.layout.widen(key, kind, taken): WIDER[kind] for key, kind in wanted}
        columns = {name: kind for name, kind in added.items() if name}
        _commit(typed, {}, [], {"layout": rules.layout.note()})
        typed.sink.add_columns(columns)
        self.done.added_columns += columns

    def _replay(self, rules: Rules, outputs: Outputs, wanted: Fresh) -> None:
        """Move rejects that fit the rules of today to the typed table."""
        rejects, typed = outputs["rejects"].sink, outputs["typed"]
        files = rejects.files()
        if not files:
            return
        source = self._input(_parts(rejects, files), rejects, wanted if self.streams else None)
        _, written = self._work(rules, {"typed": typed}, source, "replay")
        if not written["typed"]:
            return
        count = sum(file.rows for file in written["typed"])
        newest = max((file.added for file in typed.sink.files()), default=0)
        try:
            _commit(typed, {}, written["typed"], {REPLAY: f"{newest}:{count}"})
        except CommitConflict:
            discard(typed.sink, written["typed"])
            raise
        self.done.replayed += count
        self.done.files += len(written["typed"])
        self._settle(outputs)

    def _settle(self, outputs: Outputs) -> None:
        """Finish a replay, also one that was killed: remove rejects that the typed table has."""
        typed = outputs["typed"]
        mark = typed.state.notes.get(REPLAY)
        if not mark:
            return
        newest, count = map(int, mark.split(":"))
        files = typed.sink.files()
        # times of files are those of the hosts that wrote them (Delta), so a clock may have gone back
        for candidates in ([file for file in files if file.added >= newest], files):
            if count > 0:
                count -= self._remove(outputs, candidates)
        _commit(typed, {}, [], {REPLAY: ""})

    def _remove(self, outputs: Outputs, files: Sequence[LiveFile]) -> int:
        """Rewrite the rejects without rows that these files of the typed table have; return how many."""
        rejects, typed = outputs["rejects"].sink, outputs["typed"].sink
        old = rejects.files()
        if not old or not files:
            return 0
        kept = self._stored(rejects, old, REJECTS).join(
            self._stored(typed, files, pa.schema([IDENTITY.field(name) for name in ROW])), ROW, "left_anti"
        )
        target = labelled(rejects.target())
        ordered = kept.select(*REJECTS.names).sortWithinPartitions(*ROW)
        with sweep_on_error(target):
            rows = collected(self.spark, "removal of replayed rejects", ordered, writing({"rejects": target}))
        new = [DataFile(**body) for body in rows["rejects"]]
        gone = sum(file.rows for file in old) - sum(file.rows for file in new)
        if any(body["number"] for body in rows["attempt"]) or not gone:
            sweep(target, keep=new if gone else ())
        if gone:
            try:
                rejects.replace(old, new)
            except CommitConflict:
                discard(rejects, new)
                raise
        return gone

    def _stored(self, sink: Sink, files: Sequence[LiveFile], columns: pa.Schema) -> DataFrame:
        source = self._input(_parts(sink, files), sink, None)
        frame = numbered(self.spark, source.parts)
        return frame.mapInArrow(reading(source, columns), spark_schema(columns))

    def _input(self, parts: list[list[str]], sink: Sink, fresh: Fresh | None) -> Input:
        return Input(parts, sink.target(), None if fresh is None else pack_fresh(fresh), self._pattern)


def _parts(sink: Sink, files: Sequence[LiveFile]) -> list[list[str]]:
    """Return the paths that each task reads. Raises IngestError if files contain deleted rows."""
    if changed := sum(file.has_deletes for file in files):
        raise IngestError(
            f"{sink.name}: another engine has deleted rows in {changed} data file(s) that still "
            "contain them, so nothing is refined; rewrite the files with that engine (Athena: OPTIMIZE, "
            "Spark: rewrite_data_files, Delta: REORG TABLE ... APPLY (PURGE)) and run again"
        )
    return [[file.path for file in group] for group in grouped(files, _size, TASK_BYTES)]


def _notes(rules: Rules) -> dict[str, str]:
    """Return what the state of both tables says about the rules of a round."""
    return {
        "schema": rules.ddl,
        "layout": rules.layout.note(),
        "strict": "1" if rules.strict else "",
        "form": rules.form,
    }


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


def _wanted(messages: TableState, streams: Collection[str]) -> Fresh:
    """Return the numbers that the table of messages covers, of these streams (none: all)."""
    return {
        name: state.covered
        for name, state in messages.streams.items()
        if state.covered and (not streams or name.stream in streams)
    }


def _fresh(wanted: Fresh, state: TableState) -> Fresh:
    return _without(wanted, state.covered())


def _without(wanted: Fresh, known: Fresh) -> Fresh:
    return {
        name: Ranges(hole for pair in ranges for hole in known.get(name, Ranges()).missing(*pair))
        for name, ranges in wanted.items()
    }


def _left_out(promised: TableState, known: TableState) -> LeftOut:
    """Return how many left-out numbers one state has more than the other, by stream and chunk."""
    found: LeftOut = {}
    for name, stream in promised.streams.items():
        before = known.streams[name].filtered if name in known.streams else {}
        counts = {chunk: count - before.get(chunk, 0) for chunk, count in stream.filtered.items()}
        found[name] = {chunk: count for chunk, count in counts.items() if count > 0}
    return found


def _absent(fresh: Fresh, left: LeftOut) -> Absent:
    """Take the left-out numbers out of `fresh` and `left`, where nothing else is fresh in their chunk."""
    found = []
    for name, counts in left.items():
        for chunk, count in list(counts.items()) if name in fresh else ():
            whole = within(chunk, 0, MAX_SEQUENCE)
            if size(fresh[name].common(*whole)) == count:
                found.append((name, chunk, fresh[name].take(*whole)))
                del counts[chunk]
    return found


def _commit(
    output: Output, seen: Fresh, files: Sequence[DataFile], notes: dict[str, str], absent: Absent = ()
) -> None:
    """Commit on top of the state that was planned from; raises CommitConflict if the table has another."""
    sink, state = output.sink, output.state
    states = StateStore(sink.state())
    for name, ranges in seen.items():
        state.of(name).covered.update(ranges)
    for name, chunk, pairs in absent:
        stream = state.of(name)
        stream.covered.update(pairs)
        stream.filtered[chunk] = stream.filtered.get(chunk, 0) + size(pairs)
    state.notes |= notes
    version = states.save(state, state.version)
    sink.commit(state.version, version, files)
    state.version = version
    states.prune(version)


def _size(file: LiveFile) -> int:
    return file.size
