"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const GIB = 2 ** 30;
  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const words = (name) => name.replaceAll("_", " ");
  const gib = (bytes) => (bytes / GIB).toFixed(2);
  const charts = [];
  const state = { answer: null, ready: false, failed: "" };
  window.memcReport = state;

  async function unpack(id) {
    const packed = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // A line at a limit that all bars are read against.
  function limitLine(limit) {
    return {
      id: "limit",
      afterDatasetsDraw(chart) {
        const { ctx, chartArea, scales } = chart;
        const at = scales.x.getPixelForValue(limit() / GIB);
        ctx.save();
        ctx.strokeStyle = colour("text");
        ctx.lineWidth = 2;
        ctx.setLineDash([6, 4]);
        ctx.beginPath();
        ctx.moveTo(at, chartArea.top);
        ctx.lineTo(at, chartArea.bottom);
        ctx.stroke();
        ctx.restore();
      },
    };
  }

  // Horizontal stacked bars; `describe` gives labels, sets of {name, colour, values}, the unit and the limit.
  function bars(id, describe) {
    const read = () => {
      const { labels, sets } = describe();
      const shade = (set) => (Array.isArray(set.colour) ? set.colour.map(colour) : colour(set.colour));
      return {
        labels,
        datasets: sets.map((set) => ({ label: set.name, data: set.values, backgroundColor: shade(set), borderWidth: 0 })),
      };
    };
    const { unit, limit } = describe();
    const options = () => ({
      indexAxis: "y",
      animation: false,
      maintainAspectRatio: false,
      responsive: true,
      scales: {
        x: {
          stacked: true,
          suggestedMax: limit ? (limit() / GIB) * 1.04 : undefined,
          ticks: { color: colour("soft") },
          grid: { color: colour("line") },
          title: { display: true, text: unit, color: colour("soft") },
        },
        y: { stacked: true, ticks: { color: colour("text"), autoSkip: false }, grid: { display: false } },
      },
      plugins: {
        legend: { display: false },
        tooltip: { callbacks: { label: (item) => `${item.dataset.label}: ${item.raw.toFixed(2)} ${unit}` } },
      },
    });
    const plugins = limit ? [limitLine(limit)] : [];
    const chart = new Chart(byId(id), { type: "bar", data: read(), options: options(), plugins });
    charts.push(() => {
      chart.data = read();
      chart.options = options();
      chart.update("none");
    });
  }

  function legend(id, sets) {
    byId(id).replaceChildren(
      ...sets.map(([name, shade]) => {
        const item = document.createElement("li");
        item.textContent = name;
        item.style.setProperty("--swatch", `var(--${shade})`);
        return item;
      }),
    );
  }

  function memorySets(byAccount, beyond) {
    const sets = Object.entries(byAccount).map(([name, sizes]) => ({
      name: words(name), colour: name, values: sizes.map((size) => size / GIB),
    }));
    sets.push({ name: "beyond allocated", colour: "beyond", values: data.phases.map(() => beyond / GIB) });
    return sets;
  }

  const marked = (peak) => data.phases.map((phase) => (phase === peak ? `▶ ${phase}` : phase));

  function ladder() {
    let before = null;
    const within = [], over = [], saved = [], shades = [];
    for (const step of data.trail) {
      const peak = step.peak ?? 0;
      within.push(Math.min(peak, data.budget) / GIB);
      over.push(Math.max(0, peak - data.budget) / GIB);
      saved.push(step.peak === null || before === null ? 0 : Math.max(0, before - peak) / GIB);
      shades.push(step.chosen ? "chosen" : "within");
      if (step.peak !== null) before = step.peak;
    }
    return {
      labels: data.trail.map((step) => `${step.chosen ? "▶ " : ""}${step.rung}${step.peak === null ? " (n/a)" : ""}`),
      unit: "GiB",
      limit: () => data.budget,
      sets: [
        { name: "within the budget", colour: shades, values: within },
        { name: "short of", colour: "over", values: over },
        { name: "saved against the rung before", colour: "saved", values: saved },
      ],
    };
  }

  function drawAll() {
    const accounts = Object.keys(data.by_account);
    legend("legend-memory", [...accounts.map((name) => [words(name), name]), ["beyond allocated", "beyond"]]);
    bars("chart-memory", () => ({
      labels: marked(data.peak), unit: "GiB", limit: () => data.budget, sets: memorySets(data.by_account, data.beyond),
    }));
    legend("legend-ladder", [
      ["within the budget", "within"], ["chosen", "chosen"], ["short of", "over"], ["saved against the rung before", "saved"],
    ]);
    bars("chart-ladder", ladder);
    const parts = Object.entries(data.time);
    legend("legend-time", parts.map(([name]) => [name, name]));
    bars("chart-time", () => ({
      labels: ["step"], unit: "s", sets: parts.map(([name, seconds]) => ({ name, colour: name, values: [seconds] })),
    }));
    const host = Object.entries(data.host);
    legend("legend-host", host.map(([name]) => [words(name), name]));
    bars("chart-host", () => ({
      labels: ["host"],
      unit: "GiB",
      limit: data.host_limit === null ? undefined : () => data.host_limit,
      sets: host.map(([name, size]) => ({ name: words(name), colour: name, values: [size / GIB] })),
    }));
  }

  // What if: the sliders hold places in lists of values; Python prices what they stand at.
  const knobs = [...document.querySelectorAll("#knobs input")];
  const current = { ...data.knobs };
  let choices = null;

  function place(knob) {
    const values = choices[knob.name];
    const at = values.findLastIndex((value) => value <= current[knob.name]);
    knob.max = values.length - 1;
    knob.value = at < 0 ? 0 : at;
    current[knob.name] = values[knob.value];
    const unit = knob.dataset.unit && ` ${knob.dataset.unit}${current[knob.name] === 1 ? "" : "s"}`;
    const shown = current[knob.name].toLocaleString("en-US") + unit;
    byId(`value-${knob.name}`).textContent = shown;
    knob.setAttribute("aria-valuetext", shown);
    knob.disabled = values.length < 2;
  }

  function price() {
    const text = memcPrice(current.cards, current.micro_batch_size, current.max_length, current.lora_rank);
    state.answer = JSON.parse(text);
    choices = state.answer.choices;
    current.micro_batch_size = state.answer.settings.micro_batch_size;
    knobs.forEach(place);
    show(state.answer);
  }

  function momentSums(entries, moment) {
    const sums = {};
    for (const entry of entries) {
      if (!entry.in_allocator || !entry.moments.includes(moment)) continue;
      sums[entry.account] = (sums[entry.account] ?? 0) + entry.bytes;
    }
    return sums;
  }

  const total = (sums) => Object.values(sums).reduce((sum, size) => sum + size, 0);

  // The bars of a priced ledger: at each phase, the accounts at its largest moment.
  function phaseSums(bill) {
    const moments = ["backward_first_layer", "backward_last_layer", "backward_embedding"];
    return data.phases.map((phase) => {
      const asked = phase === "backward" ? moments : [phase];
      return asked.map((moment) => momentSums(bill.entries, moment)).reduce((a, b) => (total(b) > total(a) ? b : a));
    });
  }

  function whatIfBars() {
    const bill = state.answer.ledger.gpu;
    const sums = phaseSums(bill);
    const accounts = Object.keys(bill.by_account).filter((name) => sums.some((at) => at[name]));
    const byAccount = Object.fromEntries(accounts.map((name) => [name, sums.map((at) => at[name] ?? 0)]));
    return {
      labels: marked(bill.binding_phase),
      unit: "GiB",
      limit: () => data.budget,
      sets: memorySets(byAccount, bill.required_bytes - bill.peak_allocated_bytes),
    };
  }

  function cell(kind, text, name) {
    const made = document.createElement(kind);
    made.textContent = text;
    if (kind === "th") made.scope = "row";
    if (name) made.className = name;
    return made;
  }

  function signed(bytes) {
    const shown = gib(Math.abs(bytes));
    return shown === "0.00" ? "0.00" : `${bytes < 0 ? "−" : "+"}${shown}`;
  }

  let plan = null;
  let redraw = null;

  function show(answer) {
    const { ledger, clock, settings } = answer;
    const spare = data.budget - ledger.gpu.required_bytes;
    plan ??= answer;
    const mark = document.createElement("strong");
    mark.className = spare >= 0 ? "fits" : "over";
    mark.textContent = spare >= 0 ? `Fits with ${gib(spare)} GiB to spare` : `${gib(-spare)} GiB over the budget`;
    const host = data.host_limit !== null && ledger.host.required_bytes > data.host_limit ? " The host memory is too small." : "";
    byId("whatif-verdict").replaceChildren(
      mark,
      `: ${ledger.gpu.required_bytes.toLocaleString("en-US")} bytes on ${settings.world_size === 1 ? "one card" : `each of ${settings.world_size} cards`}, peak in ` +
        `${ledger.gpu.binding_phase}. ${clock.step_seconds === null ? "Time unknown:" : `${clock.step_seconds.toFixed(2)} s per`} step of ${settings.global_batch_size} samples ` +
        `(${settings.micro_batch_size} × ${settings.gradient_accumulation_steps} accumulated × ${settings.world_size}), ` +
        `${clock.step_seconds === null ? "the catalogue has too few figures of the card" : `${Math.round(clock.tokens_per_second_per_gpu).toLocaleString("en-US")} tokens/s per GPU`}.${host}`,
    );
    const rows = [
      ...Object.entries(ledger.gpu.by_account).map(([name, size]) => [words(name), size, plan.ledger.gpu.by_account[name]]),
      ["needed on one GPU", ledger.gpu.required_bytes, plan.ledger.gpu.required_bytes],
      ["host, one node", ledger.host.required_bytes, plan.ledger.host.required_bytes],
    ];
    byId("whatif-table").tBodies[0].replaceChildren(
      ...rows.filter((row) => row[1] || row[2]).map(([name, size, was]) => {
        const line = document.createElement("tr");
        if (name === "needed on one GPU") line.className = "marked";
        line.append(
          cell("th", name), cell("td", size.toLocaleString("en-US"), "number"), cell("td", gib(size), "number"),
          cell("td", signed(size - was), "number"),
        );
        return line;
      }),
    );
    if (redraw) redraw();
  }

  async function startWhatIf() {
    const brythonSource = await unpack("packed-brython");
    // Brython asks where its script came from, to load modules from there; here it finds all of them in the page.
    Object.defineProperty(document, "currentScript", { configurable: true, value: { src: "file:///page/brython.js" } });
    (0, eval)(brythonSource);
    delete document.currentScript;
    const modules = JSON.parse(await unpack("packed-modules"));
    __BRYTHON__.use_VFS = true;
    __BRYTHON__.update_VFS(modules);
    brython({ debug: 0, indexeddb: false, cache: false, ids: [] });
    __BRYTHON__.runPythonSource("import page", "__main__");
    price();
    byId("knobs").hidden = false;
    byId("whatif-result").hidden = false;
    byId("whatif-state").hidden = true;
    bars("chart-whatif", whatIfBars);
    redraw = charts.at(-1);
    for (const knob of knobs) {
      knob.addEventListener("input", () => {
        current[knob.name] = choices[knob.name][knob.value];
        price();
      });
    }
    byId("knobs").addEventListener("submit", (event) => event.preventDefault());
    byId("reset").addEventListener("click", () => {
      Object.assign(current, data.knobs);
      price();
    });
    state.ready = true;
  }

  async function start() {
    (0, eval)(await unpack("packed-chart"));
    drawAll();
    for (const query of ["(prefers-color-scheme: dark)", "print"]) {
      matchMedia(query).addEventListener("change", () => charts.forEach((draw) => draw()));
    }
    await new Promise((resolve) => setTimeout(resolve));
    await startWhatIf();
  }

  start().catch((error) => {
    state.failed = String(error?.stack ?? error);
    byId("whatif-state").textContent = "This browser cannot run charts or sliders; the tables hold the plan's figures.";
  });
})();
