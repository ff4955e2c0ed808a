
/* Who is logged in, and what is asked for in that name. The cookie is out of reach here; the token goes into a header. */
const session = { user: null, token: "", users: true, look: true, operate: true };

async function learn() {
  Object.assign(session, { user: null, token: "" }, await get("/session.json"));
  showUser();
  if (!session.look) logIn("Log in to see the state of this gateway.");
}

function showUser() {
  put($("user"), session.user === null ? "" : `Logged in as ${session.user}${session.operate ? "" : ", view only"}`);
  put($("log"), session.user === null ? "Log in" : "Log out");
}

let waiting = null;

function logIn(why, then = null) {
  waiting = then;
  put($("login-text"), session.users ? why : "There are no users yet. Add one with: streambridge users add NAME");
  put($("login-error"), "");
  if (!$("login").open) $("login").showModal();
  $("login-user").focus();
}

async function change(path, body) {
  const headers = { "Content-Type": "application/json", "X-Streambridge-Token": session.token };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body) });
}

$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  put($("login-error"), "Checking");
  try {
    Object.assign(session, { look: true }, await change("/login", { user: $("login-user").value, password: $("login-password").value }));
  } catch (error) {
    put($("login-error"), error.status === 401 ? "Wrong user or password." : error.status === 403 ? "This user may not use the page." : error.status === 503 ? "Busy. Try again in a moment." : String(error.message));
    return;
  } finally {
    $("login-password").value = "";
  }
  $("login").close();
  showUser();
  say(`Logged in as ${session.user}.`);
  wake();
  const then = waiting;
  waiting = null;
  if (then) then();
});

$("login-cancel").addEventListener("click", () => $("login").close());
$("log").addEventListener("click", async () => {
  if (session.user === null) { logIn("To pause, resume and retry exports."); return; }
  try { await change("/logout", {}); } catch (error) { if (![401, 403].includes(error.status)) { say(error.message); return; } }
  await learn();
  say(session.user === null ? "Logged out." : `Another window has logged in as ${session.user}. Log out again to end that session.`);
});

/* Carry out an operation on an export, after a login if there was none. */
async function act(operation, stream, name, done) {
  const again = () => act(operation, stream, name, done);
  if (session.user === null) { logIn(`To change the export ${name} of ${stream}.`, again); return; }
  try {
    const reply = await change(`/requests/${operation}`, { name: stream, export: name });
    say(reply.status === 0 ? `${name}: ${done}.` : reply.errorMessage);
    wake();
  } catch (error) {
    if (error.status === 401 || error.status === 403) {
      await learn();
      if (session.user === null) { logIn("Your session has ended.", again); return; }
    }
    say(`${name}: ${error.message}`);
  }
}

const ACTIONS = { pauseExports: ["Pause", "paused"], resumeExports: ["Resume", "resumed"], retryExports: ["Retry now", "tried again"] };

function buttons(e) {
  const wanted = e.disabled || !session.operate ? [] : e.paused ? ["resumeExports"] : e.error || e.stopped ? ["retryExports", "pauseExports"] : ["pauseExports"];
  return wanted.map((operation) => {
    const [text, done] = ACTIONS[operation];
    return { text, name: `${text}: export ${e.identifier} of ${e.stream}`, press: () => act(operation, e.stream, e.identifier, done) };
  });
}
