"use strict";

const SECONDS = 2;
let before = null;
let timer = null;
let turn = null;  // of the reading that goes on; one that was begun before shows nothing any more

/** Prometheus text: {metric: {replica: value}}, the samples of one replica added up. */
function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^(\w+)\{(.*)\} (\S+)$/.exec(line);
    const replica = match && /(?:^|,)replica="((?:[^"\\]|\\.)*)"/.exec(match[2]);
    if (!replica || line.includes('le="')) continue;
    const series = (found[match[1]] ??= {});
    series[replica[1]] = (series[replica[1]] ?? 0) + Number(match[3]);
  }
  return found;
}

/** A replica's id: its metrics carry its deployment's name before it. */
const id = (name) => name.split(":").pop();
const percent = (value) => (Number.isFinite(value) ? `${Math.round(100 * value)} %` : "–");
const number = (value, digits = 0) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

/** What a reading says of one replica, or of all when there is no name. */
class Reading {
  constructor(metrics, health, at) {
    this.metrics = metrics;
    this.health = health;
    this.at = at;
  }

  /** Engines by their names: those that are there, and those that have worked. */
  engines() {
    const names = Object.keys(this.metrics.llm_engine_prompt_tokens_total ?? {});
    return names.filter((name) => this.health.replicas[id(name)] || this.sum("llm_engine_prompt_tokens_total", name) > 0).sort();
  }

  sum(name, replica) {
    const series = this.metrics[name] ?? {};
    return replica === undefined ? Object.values(series).reduce((a, b) => a + b, 0) : series[replica] ?? NaN;
  }

  /** Over the replicas that are there; an engine's ratio is 0 in the series of every other process. */
  mean(name, replica) {
    return replica === undefined ? this.sum(name) / Object.keys(this.health.replicas).length : this.sum(name, replica);
  }

  grown(name, replica) {
    if (!before) return NaN;
    const names = replica === undefined ? Object.keys(this.metrics[name] ?? {}) : [replica];
    const grown = (each) => Math.max(0, this.sum(name, each) - before.sum(name, each));
    return names.map(grown).reduce((a, b) => a + (Number.isFinite(b) || replica !== undefined ? b : 0), 0);
  }

  rate(name, replica) {
    return (1000 * this.grown(name, replica)) / (this.at - before?.at);
  }

  facts(replica) {
    const drafted = this.sum("llm_speculation_drafted_total", replica);
    return {
      "Running": number(this.sum("llm_requests_running", replica)),
      "Queue": number(this.sum("llm_requests_waiting", replica)),
      "Slots in use": percent(this.mean("llm_batch_fill_ratio", replica)),
      "KV pages held": percent(this.mean("llm_kv_cache_usage_ratio", replica)),
      "Prefix hits": percent(this.mean("llm_kv_cache_hit_ratio", replica)),
      "Tokens/s": number(this.rate("llm_engine_generated_tokens_total", replica), 1),
      "Drafts accepted": drafted ? percent(this.sum("llm_speculation_accepted_total", replica) / drafted) : "–",
      "Preemptions": number(this.sum("llm_engine_preemptions_total", replica)),
    };
  }
}

function show(reading) {
  const { replicas } = reading.health;
  const totals = { "Replicas": Object.keys(replicas).length, ...reading.facts() };
  totals["Requests/s"] = number(reading.rate("llm_http_requests_total"), 1);
  totals["Failovers"] = number(reading.sum("llm_failovers_total"));
  $("totals").replaceChildren(
    ...Object.entries(totals).map(([name, value]) =>
      make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })),
    ),
  );
  const heads = ["Replica", "Step age", ...Object.keys(reading.facts())];
  $("head").replaceChildren(...heads.map((name) => make("th", { scope: "col", textContent: name })));
  $("rows").replaceChildren(
    ...reading.engines().map((name) => {
      const age = replicas[id(name)]?.step_age;
      const cells = [age === undefined ? "gone" : `${number(age, 1)} s`, ...Object.values(reading.facts(name))];
      const head = make("th", { scope: "row", textContent: id(name) });
      return make("tr", {}, head, ...cells.map((cell) => make("td", { textContent: cell })));
    }),
  );
  $("read").textContent = `Last read at ${new Date().toLocaleTimeString()}.`;
}

async function start() {
  clearTimeout(timer);
  const mine = (turn = {});
  try {
    const [metrics, health] = await Promise.all([call("metrics"), call("health", { any: true })]);
    const reading = new Reading(parse(await metrics.text()), await health.json(), performance.now());
    if (mine !== turn) return;
    show(reading);
    before = reading;
    $("error").textContent = "";
  } catch (error) {
    if (mine !== turn) return;
    if (!(error instanceof ServerError)) console.error(error);
    $("error").textContent = error.message;
    if (!$("key-form").hidden) return;
  }
  if ($("pause").getAttribute("aria-pressed") === "false") timer = setTimeout(start, 1000 * SECONDS);
}

$("pause").addEventListener("click", () => {
  const paused = $("pause").getAttribute("aria-pressed") === "false";
  $("pause").setAttribute("aria-pressed", String(paused));
  clearTimeout(timer);
  if (!paused) start();
});
setUpKey(start);
