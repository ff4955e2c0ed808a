
/* What an export and a stream look like in a table; `rank` puts trouble first. */
function exportState(e, time) {
  const skipped = e.skippedMessages ? `${whole.format(e.skippedMessages)} dropped before export` : "";
  if (e.lostMessages) {
    const [first, last] = e.lastLost, when = e.lastLostTime ? `, ${moment.format(e.lastLostTime)}` : "";
    const what = `dropped before export, the last ${whole.format(first)} to ${whole.format(last)}${when}`;
    return { pill: "bad", state: `lost ${whole.format(e.lostMessages)}`, sub: e.error ? `${what}; ${trouble(e, time)}: ${e.error}` : what, rank: 0 };
  }
  if (e.disabled) return { pill: "plain", state: "disabled", rank: 5 };
  if (e.paused) return { pill: "warn", state: "paused", sub: e.error || "", rank: 3 };
  if (e.stopped) return { pill: "bad", state: "stopped", sub: e.error, rank: 0 };
  if (e.error) return { pill: "warn", state: "retrying", sub: `${trouble(e, time)}: ${e.error}`, rank: 1 };
  if (!e.lag) return { pill: "good", state: "up to date", sub: skipped, rank: 6 };
  if (e.nextAttempt > time) {
    const next = `a batch, sent in ${span(e.nextAttempt - time)} at the latest`;
    return { pill: "good", state: "collecting", sub: skipped ? `${next}; ${skipped}` : next, rank: 4 };
  }
  return { pill: "good", state: e.kind === "consumer" ? "waiting for clients" : "exporting", sub: skipped, rank: 4 };
}

function trouble(e, time) {
  const parts = [];
  if (e.failedAttempts) parts.push(`${many(e.failedAttempts, "attempt")} failed`);
  if (e.errorSince) parts.push(`since ${span(time - e.errorSince)}`);
  if (e.nextAttempt) parts.push(e.nextAttempt > time ? `next in ${span(e.nextAttempt - time)}` : "next now");
  return parts.join(", ") || "failing";
}

function exportRows(exports, time, { linked = false, acting = false } = {}) {
  return exports.map((e) => {
    const state = exportState(e, time), late = e.lag === 0 ? 0 : e.waitingSince === null ? null : time - e.waitingSince;
    const cells = [
      linked ? { text: e.identifier, href: link(e.stream), sub: `${e.stream} to ${e.kind}` } : { text: e.identifier, sub: `to ${e.kind}` },
      { text: "", ...state },
      { text: whole.format(e.lag), sub: e.unacknowledgedMessages ? `${whole.format(e.unacknowledgedMessages)} fetched` : "" },
      { text: late === null ? "–" : span(late) },
      { text: whole.format(e.exportedMessages), sub: size(e.exportedBytes) },
      { text: e.lastExportTime ? `${span(time - e.lastExportTime)} ago` : "never" },
    ];
    if (acting) cells.push({ text: "", buttons: buttons(e) });
    return { key: JSON.stringify([e.stream, e.identifier]), cells, rank: state.rank, lag: e.lag,
      values: [e.identifier, state.rank, e.lag, late, e.exportedMessages, e.lastExportTime] };
  }).sort((a, b) => a.rank - b.rank || b.lag - a.lag);
}

function streamState(s, ready) {
  if (s.error) return { pill: "bad", state: "cannot store", sub: s.error, rank: 0 };
  if (s.name in ready.failing) return { pill: "bad", state: "full, rejects messages", rank: 0 };
  if (s.lost) return { pill: "bad", state: "lost messages", sub: `${whole.format(s.lost)} dropped before export`, rank: 0 };
  if (Object.keys(s.failures).length || s.dropped.damaged || s.dropped.unknown) return { pill: "warn", state: "lost messages", rank: 1 };
  if (s.deleting) return { pill: "warn", state: "being deleted", sub: "waits for its exports", rank: 1 };
  return { pill: "good", state: "ok", rank: 2 };
}

function used(s) {
  return { text: `${size(s.size)} of ${size(s.maxSize)}`, meter: Math.min(1, s.size / s.maxSize), calm: s.overwrites,
    label: `${s.name}: ${Math.round(100 * s.size / s.maxSize)} % of max_size` };
}

const EXPORTS = [["Export"], ["State"], ["Pending", "n"], ["Lag", "n"], ["Exported", "n"], ["Last attempt", "n"]];
const streams = new Table("streams", [["Stream"], ["State"], ["Rate", "n"], ["Messages", "n"], ["Size", "wide"], ["Oldest", "n"], ["Limits", "wide"]]);
const exports_ = new Table("exports", EXPORTS);
const upstreams = new Table("upstreams", [["Broker"], ["State"], ["Received", "n"], ["Waiting", "n"]], { filter: false });
const drops = new Table("drops", [["Where"], ["What"], ["Count", "n"]], { most: 20, usual: "unintended first" });
const hour = new Multiples("hour"), backlogs = new Multiples("backlogs");
const tiles = new Map();

function tile(name, value, sub, level = "") {
  if (!tiles.has(name)) {
    const box = make("div");
    box.append(make("dt", name), make("dd"), make("dd"));
    $("tiles").append(box);
    tiles.set(name, box);
  }
  const [, first, second] = tiles.get(name).children;
  put(first, value);
  put(second, sub);
  second.className = level;
}

function showNotices(items) {
  const list = $("notices"), wanted = JSON.stringify(items);
  if (list.shown === wanted) return;
  list.shown = wanted;
  list.replaceChildren(...items.map(([what, why]) => {
    const item = make("li");
    item.append(make("strong", what), make("span", why));
    return item;
  }));
}

function showState(level, text) {
  const state = $("state");
  state.dataset.level = level;
  put(state, text);
}

/* What is on every view: the header, the badge and the notices. */
function showHead(now) {
  const { totals, readiness: ready } = now;
  document.title = `${now.gateway} – streambridge`;
  put($("gateway"), now.gateway);
  put($("about"), `MQTT gateway, streambridge ${now.version}, running for ${span(now.time - now.started)}`);
  const since = now.time - now.started < HOUR ? "Since the start" : "The last hour";
  for (const title of ["hour-title", "stream-hour-title"]) put($(title), since);
  const notices = [];
  if (now.storageError) notices.push(["Nothing can be stored", now.storageError]);
  if (!now.workerRunning && ready.phase === "running") notices.push(["Exports are interrupted", "the worker process has ended and is being restarted"]);
  if (ready.unreachable) notices.push(["No messages are received", ready.unreachable]);
  const refused = Object.entries(ready.refused);
  for (const [name, why] of refused.slice(0, 10)) notices.push([`Messages for ${name} are not stored`, why]);
  if (refused.length > 10) notices.push([`Messages for ${refused.length - 10} other streams are not stored`, "see /readyz"]);
  if (now.time < EARLIEST) notices.push(["The clock is wrong", `it shows ${moment.format(now.time)}; messages are stored with that time`]);
  if (now.clockSteps) notices.push(["The clock was set", `${now.clockStep > 0 ? "forward" : "back"} by ${span(Math.abs(now.clockStep))}; no message expires because of that`]);
  for (const [part, why] of Object.entries(now.failingParts)) notices.push([`${part} cannot be used`, why]);
  showNotices(notices);
  const stuck = Object.keys(ready.failing).length + refused.length;
  if (now.storageError) showState("bad", "Cannot store");
  else if (ready.phase !== "running") showState("unknown", ready.phase === "stopping" ? "Stopping" : "Starting");
  else if (stuck) showState("bad", `${many(stuck, "stream")} cannot store`);
  else if (Object.keys(ready.unread).length) showState("bad", "A file cannot be used");
  else if (!ready.ok) showState("bad", "No messages are received");
  else if (totals.losing) showState("bad", `Storing; ${many(totals.losing, "export")} lost messages`);
  else if (totals.stopped) showState("bad", `Storing; ${many(totals.stopped, "export")} stopped`);
  else if (totals.failing) showState("warn", `Storing; ${many(totals.failing, "export")} retrying`);
  else showState("good", "All is well");
}

function dropRows(lists) {
  const rows = [];
  for (const s of lists) {
    const add = (kind, counts, intended) => {
      for (const [why, n] of Object.entries(counts)) rows.push([`stream ${s.name}`, `${kind}: ${spoken(why)}`, n, intended(why)]);
    };
    add("dropped", s.dropped, (why) => !s.lost && why !== "damaged" && why !== "unknown");
    if (s.lost) add("lost", { "dropped before export": s.lost }, () => false);
    add("rejected", s.rejected, () => false);
    add("files", s.failures, () => false);
    if (s.deduplicated) rows.push([`stream ${s.name}`, "not stored twice", s.deduplicated, true]);
  }
  return rows;
}

const asDropRows = (rows) => rows.sort((a, b) => a[3] - b[3]).map(([where, what, n, intended]) => ({
  key: `${where} ${what}`, values: [where, what, n], cells: [where, { text: what, sub: intended ? "as configured" : "" }, whole.format(n)] }));

function showOverview(now) {
  const { totals, readiness: ready } = now;
  const sessions = Object.values(now.counts).reduce((sum, c) => sum + (c.sessions || 0), 0);
  tile("Clients", whole.format(now.connections), `${many(sessions, "session")} kept`);
  tile("Stored per second", rate(totals.rate), `${whole.format(totals.stored)} in total`);
  tile("Pending exports", whole.format(totals.pending), totals.failing ? `${totals.failing} of ${totals.active} exports retrying` : many(totals.active, "export"), totals.failing ? "warn" : "");
  tile("Stored", size(totals.size), many(totals.messages, "message"));
  tile("Disk free", now.diskSize ? size(now.diskFree) : "–", now.diskSize ? `of ${size(now.diskSize)}` : "");
  tile("Lost or rejected", whole.format(totals.lost), totals.dropped ? `${whole.format(totals.dropped)} more dropped by streams, as configured` : "none by limits of streams", "");
  tiles.get("Lost or rejected").classList.toggle(totals.losing ? "bad" : "warn", totals.lost > 0);

  streams.show(now.streams.map((s) => {
    const state = streamState(s, ready), oldest = s.oldestTime === null ? null : now.time - s.oldestTime;
    return { key: s.name, rank: state.rank, values: [s.name, state.rank, s.rate, s.messages, s.size, oldest, s.maxSize], cells: [
      { text: s.name, href: link(s.name), sub: [s.description, s.persistence === "Memory" ? "in memory" : ""].filter(Boolean).join("; ") },
      { text: "", ...state },
      { text: s.rate === null ? "–" : `${rate(s.rate)}/s` },
      { text: whole.format(s.messages), sub: s.newest < 0 ? "" : `to number ${whole.format(s.newest)}` },
      used(s),
      { text: oldest === null ? "–" : span(oldest) },
      { text: s.limits[0], sub: s.limits.slice(1).join(", ") },
    ] };
  }).sort((a, b) => a.rank - b.rank), totals.streams);
  exports_.show(exportRows(now.exports, now.time, { linked: true }), totals.exports);
  $("upstreams").hidden = !now.upstreams.length;
  upstreams.show(now.upstreams.map((u) => ({ key: u.name, rank: u.error ? 0 : 1, values: [u.name, u.error ? 0 : 1, u.received, u.waiting], cells: [
    { text: u.name, sub: u.url },
    u.error ? { text: "", pill: "warn", state: u.connected ? "held" : "not connected", sub: u.error } : { text: "", pill: "good", state: "connected" },
    whole.format(u.received),
    whole.format(u.waiting),
  ] })).sort((a, b) => a.rank - b.rank));
  const lines = dropRows(now.streams);
  for (const [frontEnd, counts] of Object.entries(now.counts))
    for (const [what, n] of Object.entries(counts)) {
      const [, kind, why] = /^(dropped|rejected|refused)_(.*)$/.exec(what) || [];
      if (kind && n) lines.push([frontEnd, `${kind}: ${spoken(why)}`, n, kind === "refused"]);
      if (what === "not_retained" && n) lines.push([frontEnd, "taken, but not retained", n, true]);
      if (what === "ended_sessions" && n) lines.push([frontEnd, "sessions ended by a limit", n, false]);
    }
  drops.show(asDropRows(lines));
}

/* The hour before, and this moment at its end. */
function showHour(past, now) {
  const times = [...past.times, now.time], { totals } = now;
  hour.show([
    { key: "rate", title: "Messages stored per second", times, values: [...rates(past.times, past.stored), totals.rate], format: asRate },
    { key: "pending", title: "Pending exports, messages", times, values: [...past.pending, totals.pending], format: asCount },
    { key: "size", title: "Size of all streams", times, values: [...past.size, totals.size], format: asSize, top: binary },
    { key: "lost", title: "Lost or rejected per second", times, values: [...rates(past.times, past.lost), null], format: asRate },
  ]);
  const current = new Map(now.exports.map((e) => [JSON.stringify([e.stream, e.identifier]), e]));
  $("backlog").hidden = !past.exports.length;
  backlogs.show(past.exports.map(({ stream, export: name, pending }) => {
    const e = current.get(JSON.stringify([stream, name]));
    return { key: JSON.stringify([stream, name]), title: `${stream} → ${name}`, href: link(stream), times, format: asCount,
      values: [...pending, e ? e.lag : null], level: e && e.error && !e.paused ? "warn" : "" };
  }));
}
