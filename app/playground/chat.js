"use strict";

const settings = $("settings").elements;
/** What this tab has kept. An older page, or another one of this address, may have kept something else there. */
function kept(name, fits) {
  try {
    const value = JSON.parse(sessionStorage.getItem(name));
    if (fits(value)) return value;
  } catch { /* not even JSON */ }
  return null;
}

const isMessage = (m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string";
const conversation = kept("conversation", (all) => Array.isArray(all) && all.every(isMessage)) ?? [];
let running = null;  // the AbortController of the answer on its way

function view() {
  return $("settings").elements.view.value;
}

/** Keeps what was said. The message that is being answered is kept apart: a reload gives it back to write on. */
function keep() {
  const open = running ? conversation.at(-1)?.content ?? "" : "";
  sessionStorage.setItem("conversation", JSON.stringify(running ? conversation.slice(0, -1) : conversation));
  sessionStorage.setItem("open", open);
  const values = [...new FormData($("settings"))].filter(([name]) => name !== "model");
  sessionStorage.setItem("settings", JSON.stringify(Object.fromEntries(values)));
}

function restore() {
  for (const [name, value] of Object.entries(kept("settings", (all) => all?.constructor === Object) ?? {})) {
    if (settings.namedItem(name)) settings[name].value = value;
  }
  document.body.dataset.view = view();
  for (const { role, content } of conversation) addMessage(role).append(content);
  $("prompt").value ||= sessionStorage.getItem("open") ?? "";
}

/** Adds an article to the conversation and returns the place of its text. */
function addMessage(role) {
  const text = make("div", { className: "text" });
  const title = role === "user" ? "You" : "Model";
  $("messages").append(make("article", { className: role }, make("h2", { textContent: title }), text));
  return text;
}

function follow() {
  const box = $("messages");
  box.scrollTop = box.scrollHeight;
}

/** The data of each event of a server-sent stream; an event of type error is thrown. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message);
      yield event;
    }
  }
}

async function listModels(options) {
  const { data } = await (await call("v1/models", options)).json();
  const chosen = settings.model.value;
  settings.model.replaceChildren(...data.map(({ id }) => make("option", { value: id, textContent: id })));
  if (data.some(({ id }) => id === chosen)) settings.model.value = chosen;
}

function body(messages) {
  const asked = { model: settings.model.value, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (settings[name].value !== "") asked[name] = Number(settings[name].value);
  }
  if (view() !== "plain") Object.assign(asked, { logprobs: true, top_logprobs: 3, return_token_origins: true });
  return JSON.stringify(asked);
}

/** One answer as it comes: its text, its tokens and its times. */
class Answer {
  constructor() {
    this.text = "";
    this.tokens = [];
    this.count = 0;
    this.reason = "stopped";
    this.sent = performance.now();
    this.place = addMessage("assistant");
    this.decoder = new TextDecoder();
  }

  take(event) {
    if (event.usage) this.count = event.usage.completion_tokens;
    const choice = event.choices[0];
    if (!choice) return;
    const { content = "", reasoning_content: thinking = "" } = choice.delta;
    const tokens = choice.logprobs?.content ?? [];
    if (content || thinking || tokens.length) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    this.text += content ?? "";
    if (tokens.length) tokens.forEach((token, i) => this.addToken(token, choice.token_origins?.[i] ?? "target"));
    else if (!this.tokens.length) this.addText(content, thinking);
    if (choice.finish_reason) this.reason = choice.finish_reason;
  }

  addText(content, thinking) {
    if (thinking) {
      this.thinking ??= this.place.insertAdjacentElement("beforebegin", make("div", { className: "thinking" }));
      this.thinking.append(thinking);
    }
    if (content) this.place.append(content);
  }

  addToken(token, origin) {
    const p = Math.exp(token.logprob);
    const level = [0.05, 0.2, 0.5, 0.9].filter((bound) => p >= bound).length;
    const text = this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
    this.tokens.push({ text: token.token, p, origin, others: token.top_logprobs });
    this.place.append(make("span", { className: `token p${level} ${origin}`, title: percent(p), textContent: text }));
  }

  end() {
    const seconds = (this.last - this.first) / 1000;
    const count = this.count || this.tokens.length;
    const facts = [`${count || "?"} tokens`, { stop: "complete", length: "cut at the limit" }[this.reason] ?? this.reason];
    if (this.first) facts.push(`first token after ${Math.round(this.first - this.sent)} ms`);
    if (count > 1 && seconds > 0) facts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    this.place.after(make("p", { className: "facts", textContent: facts.join(" · ") }));
    if (this.tokens.length) this.place.parentElement.append(this.table());
    return facts.join(", ");
  }

  /** The same as the colours say, for those who don't see them. */
  table() {
    const details = make("details", {}, make("summary", { textContent: "Tokens in a table" }));
    details.addEventListener("toggle", () => {
      if (details.children.length > 1) return;
      const head = ["Token", "Probability", "Origin", "Likeliest"];
      const rows = this.tokens.map(({ text, p, origin, others }) => {
        const likeliest = others.map((other) => `${JSON.stringify(other.token)} ${percent(Math.exp(other.logprob))}`);
        return [JSON.stringify(text), percent(p), origin.replace("_", ", "), likeliest.join(", ")];
      });
      const row = (cells, name) => make("tr", {}, ...cells.map((cell) => make(name, { textContent: cell })));
      const table = make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((r) => row(r, "td"))));
      const box = make("div", { className: "scroll", tabIndex: 0 }, table);
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", "Tokens");
      details.append(box);
    });
    return details;
  }
}

function percent(p) {
  return `${(100 * p).toFixed(1)} %`;
}

async function send(prompt) {
  $("error").textContent = "";
  addMessage("user").append(prompt);
  const said = { role: "user", content: prompt };
  conversation.push(said);
  const system = settings.system.value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  const answer = new Answer();
  running = new AbortController();
  keep();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("status").textContent = "The model answers.";
  let error = "";
  try {
    const { signal } = running;
    if (!settings.model.value) await listModels({ signal });  // asked before the page had them
    const options = { method: "POST", body: body(messages), signal };
    for await (const event of events(await call("v1/chat/completions", options))) {
      answer.take(event);
      follow();
    }
  } catch (failure) {
    if (failure.name !== "AbortError") {
      if (!(failure instanceof ServerError)) console.error(failure);
      error = failure.message;
      if (failure.status === 404) await listModels().catch(() => {});  // the server serves others now
    }
  }
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  if (conversation.at(-1) !== said) {  // a new chat was begun meanwhile
    $("status").textContent = "";
    return;
  }
  if (error && !answer.first) {  // nothing was said: the message goes back to where it came from
    $("messages").lastChild.remove();
    $("messages").lastChild.remove();
    conversation.pop();
    $("prompt").value ||= prompt;
  } else {
    if (error) answer.reason = "broken off";
    conversation.push({ role: "assistant", content: answer.text });
    $("status").textContent = `Answer ended: ${answer.end()}`;
  }
  $("error").textContent = error;
  follow();
  keep();
}

async function start() {
  $("error").textContent = "";
  $("prompt").focus();
  try {
    await listModels();
  } catch (error) {
    $("error").textContent = error.message;
  }
}

$("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = $("prompt").value.trim();
  if (running || !prompt || !$("settings").reportValidity()) return;
  $("prompt").value = "";
  send(prompt);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("prompt-form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
$("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  $("messages").replaceChildren();
  $("error").textContent = "";
  keep();
  $("prompt").focus();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("change", () => {
  document.body.dataset.view = view();
  keep();
});
restore();
setUpKey(start);
