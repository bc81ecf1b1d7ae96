// The feed of server-sent events, read with fetch(): EventSource could not send the token.

const SILENCE_MS = 10_000; // The server sends two events a second.
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 5_000;

// Calls onEvent with each event, and onState with what has become of the feed:
// {kind: "live" | "refused" | "lost" | "stopped", ...}.
export class Feed {
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.running = null;
  }

  start(token) {
    this.stop();
    const run = new AbortController();
    this.running = run;
    this.follow(token, run.signal);
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  // Reads feed after feed until it is stopped or the token is refused.
  async follow(token, stopped) {
    let retry = FIRST_RETRY_MS;
    let since = null;
    while (!stopped.aborted) {
      let why = null;
      try {
        await this.read(token, stopped, () => {
          retry = FIRST_RETRY_MS;
          since = null;
        });
      } catch (error) {
        why = error;
      }
      if (stopped.aborted) return;
      if (why instanceof Refused && why.isForGood) {
        this.onState({ kind: "refused", hadToken: token !== "", message: why.message });
        return;
      }
      since ??= new Date();
      this.onState({ kind: "lost", since, why: why instanceof Refused ? why.message : null, retry });
      await new Promise((resolve) => setTimeout(resolve, retry));
      retry = Math.min(retry * 2, LAST_RETRY_MS);
    }
  }

  // Reads one feed to its end.
  async read(token, stopped, onFirst) {
    const over = new AbortController();
    const end = () => over.abort();
    stopped.addEventListener("abort", end);
    let alarm = setTimeout(end, SILENCE_MS);
    try {
      const headers = token === "" ? {} : { authorization: `Bearer ${token}` };
      const response = await fetch("events", { headers, signal: over.signal, cache: "no-store" });
      if (!response.ok) throw await refusal(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(alarm);
        alarm = setTimeout(end, SILENCE_MS);
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          if (stopped.aborted) return;
          onFirst();
          this.onState({ kind: "live" });
          this.onEvent(JSON.parse(event.slice("data: ".length)));
        }
      }
    } finally {
      clearTimeout(alarm);
      stopped.removeEventListener("abort", end);
      over.abort();
    }
  }
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.isForGood = status === 401 || status === 403;
  }
}

async function refusal(response) {
  let message = `the server answers ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Whatever stands between does not answer as the server does; the status says enough.
  }
  return new Refused(response.status, message);
}
