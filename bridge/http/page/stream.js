
/* One stream in detail, and its newest messages. */
const streamExports = new Table("stream-exports", [...EXPORTS, [""]], { filter: false });
const streamDrops = new Table("stream-drops", [["Where"], ["What"], ["Count", "n"]], { filter: false });
const streamHour = new Multiples("stream-hour");
const KEPT_MESSAGES = 200;
const tail = { stream: null, topic: "", epoch: null, newest: -1, held: false };

function fact(name, text, sub = "") {
  const box = make("div");
  box.append(make("dt", name), make("dd", text));
  if (sub) box.append(make("dd", sub));
  return box;
}

function showStream(found, ready) {
  const { stream: s, time } = found;
  put($("stream-text"), [s.description, s.persistence === "Memory" ? "in memory" : "", ...Object.entries(s.tags).map(([key, value]) => `${key}=${value}`)].filter(Boolean).join("; "));
  const state = streamState(s, ready);
  const at = (when, number) => s.messages && when !== null ? [`${span(time - when)} ago`, `number ${whole.format(number)}, ${moment.format(when)}`] : ["–"];
  const facts = [
    ["State", state.state, state.sub],
    ["Rate", s.rate === null ? "–" : `${rate(s.rate)}/s`, "the last 5 to 10 s"],
    ["Messages", whole.format(s.messages), s.pending ? `${size(s.pending)} not committed` : ""],
    ["First message", ...at(found.firstTime, s.oldest)],
    ["Last message", ...at(found.lastTime, s.newest)],
    ["Size", `${size(s.size)} of ${size(s.maxSize)}`, `${Math.round(100 * s.size / s.maxSize)} %`],
    ["Topics", found.topics.join(", ") || `streams/${s.name}`],
    ["Limits", s.limits[0], s.limits.slice(1).join(", ")],
    ["Encryption", ...s.encryption.split(", ")],
  ];
  const wanted = JSON.stringify(facts);
  if ($("facts").shown !== wanted) {
    $("facts").shown = wanted;
    $("facts").replaceChildren(...facts.map((one) => fact(...one)));
    $("facts").firstChild.dataset.level = state.pill;
  }
  const times = [...found.times, time];
  const charts = [{ key: "stored", title: "Messages stored per second", times, values: [...rates(found.times, found.stored), s.rate], format: asRate }];
  for (const { what, name, values } of found.series) {
    if (what === "pending") {
      const e = found.exports.find((one) => one.identifier === name);
      if (e) charts.push({ key: `pending ${name}`, title: `Pending for ${name}`, times, values: [...values, e.lag], format: asCount, level: e.error && !e.paused ? "warn" : "" });
      continue;
    }
      const intended = what === "dropped" && name !== "damaged" && name !== "unknown";
    charts.push({ key: `${what} ${name}`, title: `${what === "dropped" ? "Dropped" : "Rejected"} per second: ${spoken(name)}`, times,
      values: [...rates(found.times, values.map((value) => value ?? 0)), null], format: asRate, level: intended ? "" : "warn" });
  }
  streamHour.show(charts);
  streamExports.show(exportRows(found.exports, time, { acting: true }));
  streamDrops.show(asDropRows(dropRows([s])));
}

function messageItem(m) {
  const item = make("li"), head = make("span", undefined, "head");
  head.append(make("span", `#${m.number}`), make("span", moment.format(m.time)), make("span", m.topic || "no topic", "topic"), make("span", size(m.size)));
  const shown = m.hex ? m.payload.split(" ").length : new TextEncoder().encode(m.payload).length;
  item.append(head, make("code", m.size ? m.payload + (shown < m.size ? " …" : "") : "empty"));
  return item;
}

function resetTail(name) {
  Object.assign(tail, { stream: name, newest: -1 });
  $("tail").replaceChildren();
  put($("tail-text"), "Loading");
}

async function followTail(name) {
  if (tail.held && tail.newest >= 0) return;
  const topic = tail.topic;
  let found;
  try {
    found = await get("/tail.json", { name, topic, after: tail.newest >= 0 ? tail.newest : null });
  } catch (error) {
    if (![400, 401, 403, 404].includes(error.status)) throw error;
    put($("tail-text"), error.status === 401 || (error.status === 403 && session.users && session.user === null) ? "Log in to read messages." : error.message);
    return;
  }
  if (tail.stream !== name || tail.topic !== topic) return;
  const list = $("tail");
  if (tail.newest >= 0 && found.epoch !== tail.epoch) {  // deleted and made anew: its numbers begin again
    resetTail(name);
    await followTail(name);
    return;
  }
  tail.epoch = found.epoch;
  tail.newest = found.newest;
  list.prepend(...found.messages.reverse().map(messageItem));
  while (list.children.length > KEPT_MESSAGES) list.lastChild.remove();
  const missed = found.left ? ` ${whole.format(found.left)} more have arrived since and are not shown.` : "";
  put($("tail-text"), list.children.length ? `Newest first, at most ${KEPT_MESSAGES}.${missed}` : topic ? "No recent message matches this filter." : "No messages yet.");
}

$("tail-form").addEventListener("submit", (event) => event.preventDefault());
$("tail-topic").addEventListener("input", () => {
  tail.topic = $("tail-topic").value.trim();
  resetTail(tail.stream);
  wake();
});
$("tail-pause").addEventListener("click", () => {
  tail.held = !tail.held;
  $("tail-pause").setAttribute("aria-pressed", String(tail.held));
});
