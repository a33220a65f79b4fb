// Draw the plots of a postmortem page from the data block `figures`, in the colours of the style sheet.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 760px)");
  let axis = "order"; // or "step"
  let following = false; // while one plot's zoom is copied to the others

  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name.replace("@", "")}`).trim();
  const place = (item) => (axis === "order" ? item.x : item.steps);

  // Labels of the run's making become text for plotly, which reads a few tags in it.
  const plain = (text) => text && text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const wrapped = (text) => text && plain(text).replace(/(.{60,76}?) /g, "$1<br>");

  function trace(given, figure) {
    const lines = given.mode.includes("lines");
    const where = figure.name === "timeline" || given.edge;
    return {
      type: "scatter",
      mode: given.mode,
      x: place(given),
      y: given.y,
      yaxis: given.edge ? "y2" : "y",
      name: plain(given.name),
      customdata: given.steps,
      text: given.text && given.text.map(wrapped),
      hovertemplate: where ? "%{text}<extra></extra>" : "step %{customdata}: %{y:.5g}<extra>%{fullData.name}</extra>",
      line: lines ? { color: colour(given.color), width: given.width, shape: "linear" } : undefined,
      marker: {
        color: given.colors ? given.colors.map(colour) : colour(given.color || "@action"),
        symbol: given.symbols || given.symbol || "circle",
        size: given.size || 8,
        line: { width: given.symbols ? 1 : 0, color: colour("@card") },
      },
      connectgaps: false,
      showlegend: Boolean(figure.legend) && given.color !== "@history" && !given.edge,
    };
  }

  // What was taken back has no place of its own by step: what replaced it stands there.
  const cells = (figure) => figure.live.map((live, number) => number).filter(
    (number) => axis === "order" || (figure.live[number] && figure.steps[number][1] > figure.steps[number][0]));
  const where = (figure, number) => {
    const [first, last] = figure.steps[number].map(Math.ceil).map((step, end) => step - end);
    return first === last ? `step ${first}` : `steps ${first} to ${last}`;
  };

  // Edges of cells may have holes between them: an empty column stands there.
  function heat(figure) {
    const edges = [], columns = [];
    for (const number of cells(figure)) {
      const [from, to] = place(figure)[number];
      const before = edges[edges.length - 1];
      if (!edges.length) edges.push(from);
      else if (to <= before) continue;
      else if (from > before) { columns.push(null); edges.push(from); }
      columns.push(number);
      edges.push(to);
    }
    const of = (number, row) => (number === null ? null : row[number]);
    const scaled = (value) => (value === null || !figure.log ? value : value > 0 ? Math.log10(value) : null);
    const words = (label, number, value) => value === null ? "" : `${label}<br>${where(figure, number)}: ${value}`;
    const z = figure.z.map((row) => columns.map((number) => scaled(of(number, row))));
    const powers = figure.log ? decades(z) : [];
    return [{
      type: "heatmap", x: edges, y: figure.rows.map((label, number) => number), z, hoverongaps: false,
      text: figure.z.map((row, line) => columns.map((number) => words(plain(figure.rows[line]), number, of(number, row)))),
      hovertemplate: "%{text}<extra></extra>",
      colorscale: [[0, colour("@heat-low")], [0.5, colour("@heat-mid")], [1, colour("@heat-high")]],
      showscale: !narrow.matches,
      colorbar: {
        thickness: 8, outlinewidth: 0, nticks: 5, x: 1.01, tickfont: { size: 10.5 }, exponentformat: "power",
        tickvals: figure.log ? powers : undefined, ticktext: figure.log ? powers.map((power) => `1e${power}`) : undefined,
      },
    }];
  }

  function decades(z) {
    const known = z.flat().filter((value) => value !== null);
    const least = Math.floor(known.reduce((a, b) => Math.min(a, b), 0)), most = Math.ceil(known.reduce((a, b) => Math.max(a, b), least));
    const apart = Math.max(1, Math.ceil((most - least) / 6));
    return Array.from({ length: Math.floor((most - least) / apart) + 1 }, (_, number) => least + number * apart);
  }

  function bars(figure) {
    const shown = cells(figure);
    const ends = shown.map((number) => place(figure)[number]);
    return figure.z.map((row, line) => ({
      type: "bar", name: figure.rows[line],
      x: ends.map(([from, to]) => (from + to) / 2), width: ends.map(([from, to]) => to - from), y: shown.map((number) => row[number]),
      text: shown.map((number) => where(figure, number)), textposition: "none",
      hovertemplate: "%{text}: %{y:.4g} s<extra>%{fullData.name}</extra>",
      marker: { color: colour(figure.colors[line]), line: { width: 0 }, opacity: shown.map((number) => (figure.live[number] ? 1 : 0.4)) },
    }));
  }

  const traces = (figure) =>
    figure.kind === "heat" ? heat(figure) : figure.kind === "bars" ? bars(figure) : figure.traces.map((given) => trace(given, figure));

  function shapes(figure) {
    if (figure.name === "timeline") return data.turns.map((turn) => rule(turn));
    const covered = Boolean(figure.kind); // cells fill the plot: an outline is seen on them, a shade below is not
    const bands = data.bands.map((band) => ({
      type: "rect", xref: "x", yref: "paper", x0: place(band)[0] - 0.5, x1: place(band)[1] + 0.5, y0: 0, y1: 1,
      fillcolor: covered ? "rgba(0,0,0,0)" : colour(band.color), opacity: covered ? 0.8 : 0.16,
      line: { width: 1, color: colour(band.color) }, layer: covered ? "above" : "below",
    }));
    return bands.concat(data.turns.map((turn) => rule(turn)));
  }

  const rule = (turn) => ({
    type: "line", xref: "x", yref: "paper", x0: place(turn), x1: place(turn), y0: 0, y1: 1,
    line: { color: colour("@turn"), width: 1.2, dash: "dash" },
  });

  function annotations(figure) {
    if (figure.name !== "loss" || narrow.matches || data.turns.length > 8) return [];
    return data.turns.map((turn, number) => ({
      x: place(turn), y: 1 - 0.085 * (number % 3), xref: "x", yref: "paper", text: plain(turn.words), showarrow: false,
      xanchor: "left", yanchor: "top", font: { size: 11, color: colour("@quiet") }, bgcolor: colour("@card"), borderpad: 1,
    }));
  }

  function layout(figure) {
    const grid = { gridcolor: colour("@grid"), zeroline: false, linecolor: colour("@rule"), automargin: true };
    const lanes = figure.lanes;
    // The wide plots begin at one line, so that a place is below itself.
    const wide = lanes || (holder(figure).closest(".grid") === null && !narrow.matches);
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: colour("@quiet") },
      margin: { l: wide ? 96 : 46, r: 12, t: 10, b: 34 },
      height: lanes ? 58 + 30 * lanes.length : undefined,
      barmode: "stack", bargap: 0,
      hovermode: "closest",
      hoverlabel: { bgcolor: colour("@card"), bordercolor: colour("@rule"), font: { color: colour("@ink") }, align: "left" },
      dragmode: narrow.matches ? false : "zoom",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, entrywidth: figure.kind && narrow.matches ? 130 : undefined },
      xaxis: { ...grid, title: { text: axis === "order" ? "update, in the order tried" : "step", standoff: 6 }, nticks: narrow.matches ? 5 : 12 },
      yaxis: lanes
        ? { ...grid, type: "category", categoryarray: lanes.slice().reverse(), categoryorder: "array", fixedrange: true,
            range: [-0.6, lanes.length - 0.4] }
        : figure.kind === "heat" ? { ...grid, ...rows(figure), showgrid: false }
        : { ...grid, type: figure.log ? "log" : "linear", exponentformat: figure.unit.length === 1 || figure.prefixes ? "SI" : "power", showticklabels: !figure.empty,
            ticksuffix: figure.unit.length === 1 ? figure.unit : "", nticks: 6,
            rangemode: figure.log ? "normal" : figure.name === "loss" ? "normal" : "tozero" },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: shapes(figure),
      annotations: annotations(figure),
      showlegend: Boolean(figure.legend),
    };
  }

  // A tick for as many rows as there is room for; the first row is the upper one but for magnitudes.
  function rows(figure) {
    const count = figure.rows.length;
    const apart = Math.ceil(count / Math.floor(tall(figure) / 18));
    const ticks = figure.rows.map((label, number) => number).filter((number) => number % apart === 0);
    const short = (label) => (label.length > 22 ? `…${label.slice(-21)}` : label);
    const ends = [-0.5, count - 0.5];
    return { tickvals: ticks, ticktext: ticks.map((number) => plain(short(figure.rows[number]))), fixedrange: true,
      range: figure.upwards ? ends : ends.reverse() };
  }

  const tall = (figure) => Math.min(480, Math.max(narrow.matches ? 215 : 250, 60 + 9 * figure.rows.length));

  const holder = (figure) => document.getElementById(`plot-${figure.name}`);
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  function draw() {
    for (const figure of data.figures) {
      if (figure.lanes) holder(figure).style.height = `${58 + 30 * figure.lanes.length}px`;
      if (figure.kind === "heat") holder(figure).style.height = `${tall(figure)}px`;
      Plotly.react(holder(figure), traces(figure), layout(figure), config);
    }
    together();
  }

  // All plots begin and end at the same place, and zoom as one.
  function together() {
    const all = data.figures.flatMap((figure) => figure.traces.flatMap((given) => place(given))).filter((x) => x !== null);
    const last = all.reduce((most, x) => Math.max(most, x), 1);
    const first = all.reduce((least, x) => Math.min(least, x), last);
    const room = Math.max(1, (last - first) * 0.015);
    zoom(null, [first - room, last + room]);
  }

  async function zoom(source, range) {
    following = true;
    const others = data.figures.map(holder).filter((plot) => plot !== source);
    await Promise.all(others.map((plot) => Plotly.relayout(plot, { "xaxis.range": range.slice() })));
    following = false;
  }

  function follow(plot) {
    plot.on("plotly_relayout", (change) => {
      if (following) return;
      if ("xaxis.range[0]" in change) zoom(plot, [change["xaxis.range[0]"], change["xaxis.range[1]"]]);
      else if (change["xaxis.autorange"]) together();
    });
  }

  for (const button of document.querySelectorAll("button[data-axis]")) {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      for (const other of document.querySelectorAll("button[data-axis]")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      draw();
    });
  }
  draw();
  data.figures.map(holder).forEach(follow);
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  document.documentElement.dataset.drawn = String(data.figures.length);
})();
