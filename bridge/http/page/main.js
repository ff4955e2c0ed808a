
/* Which view is shown, by the address after `#`; and what keeps it up to date. */
function route() {
  const [, view = "", name = ""] = location.hash.split("/");
  if (view === "stream") {
    try { return { view, name: decodeURIComponent(name) }; } catch { /* shown as the overview */ }
  }
  return { view: ["clients", "events"].includes(view) ? view : "overview", name: "" };
}

const ROWS = 500;  // in one document; beyond them the gateway filters
let bounded = false;
let past = null, pastAsked = 0, timer = null, busy = false, again = false, answered = Date.now();

function showView(focus) {
  const { view, name } = route();
  for (const part of document.querySelectorAll("main > [data-view]")) part.hidden = part.dataset.view !== view;
  for (const anchor of document.querySelectorAll("nav [data-view]")) {
    if (anchor.dataset.view === view || (view === "stream" && anchor.dataset.view === "overview")) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  if (view === "stream" && tail.stream !== name) {
    put($("stream-title"), name);
    put($("stream-text"), "Loading");
    $("facts").replaceChildren();
    $("facts").shown = "";
    streamHour.show([]);
    streamExports.show([]);
    streamDrops.show([]);
    resetTail(name);
  }
  if (focus) {
    scrollTo(0, 0);
    ($(`${view}-title`) || $("main")).focus({ preventScroll: true });
  }
  wake();
}

async function update() {
  const at = location.hash, { view, name } = route();
  const filtered = view === "overview" && bounded;
  const now = await get("/status.json", filtered ? { stream: streams.find, export: exports_.find } : {});
  bounded = now.totals.streams > ROWS || now.totals.exports > ROWS;
  showHead(now);
  if (view === "overview") {
    if (location.hash === at) showOverview(now);
    if (!past || Date.now() - pastAsked > 10000) { past = await get("/history.json"); pastAsked = Date.now(); }
    if (location.hash === at) showHour(past, now);
  } else if (view === "stream") {
    try {
      const found = await get("/stream.json", { name });
      if (location.hash === at) showStream(found, now.readiness);
      await followTail(name);
    } catch (error) {
      if (error.status !== 404) throw error;
      put($("stream-text"), error.message);
    }
    await learnEvents(now);
    showEvents($("stream-events"), $("stream-events-empty"), (line) => line.stream === name);
  } else if (view === "clients") await showClients(now);
  else { await learnEvents(now); showAllEvents(); }
}

function showStale(error) {
  const late = Date.now() - answered > STALE || error;
  document.body.dataset.stale = String(Boolean(late));
  $("stale").hidden = !late;
  if (!late) return;
  put($("stale"), `What you see is not current: no answer since ${moment.format(answered)}.`);
  showState("bad", `No answer since ${clock.format(answered)}`);
}

async function turn() {
  if (busy) { again = true; return; }
  busy = true;
  clearTimeout(timer);
  try {
    if (!document.hidden) {
      await update();
      answered = Date.now();
      showStale(null);
    }
  } catch (error) {
    if (error.status === 401) await learn().catch(() => {});
    else { console.warn(error); showStale(error); }
  }
  busy = false;
  timer = setTimeout(turn, again ? 0 : POLL);
  again = false;
}

function wake() { turn(); }

setInterval(() => { if (!document.hidden) showStale(null); }, POLL);
addEventListener("hashchange", () => showView(true));
document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
learn().catch((error) => console.warn(error));
showView(false);
