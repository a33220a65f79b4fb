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

  function shapes(figure) {
    if (figure.name === "timeline") return data.turns.map((turn) => rule(turn));
    const bands = data.bands.map((band) => ({
      type: "rect", xref: "x", yref: "paper", x0: place(band)[0] - 0.5, x1: place(band)[1] + 0.5, y0: 0, y1: 1,
      fillcolor: colour(band.color), opacity: 0.16, line: { width: 1, color: colour(band.color) }, layer: "below",
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
      hovermode: "closest",
      hoverlabel: { bgcolor: colour("@card"), bordercolor: colour("@rule"), font: { color: colour("@ink") }, align: "left" },
      dragmode: narrow.matches ? false : "zoom",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      xaxis: { ...grid, title: { text: axis === "order" ? "update, in the order tried" : "step", standoff: 6 }, nticks: narrow.matches ? 5 : 12 },
      yaxis: lanes
        ? { ...grid, type: "category", categoryarray: lanes.slice().reverse(), categoryorder: "array", fixedrange: true,
            range: [-0.6, lanes.length - 0.4] }
        : { ...grid, type: figure.log ? "log" : "linear", exponentformat: figure.unit.length === 1 ? "SI" : "power", showticklabels: !figure.empty,
            ticksuffix: figure.unit.length === 1 ? figure.unit : "", nticks: 6,
            rangemode: figure.log ? "normal" : figure.name === "loss" ? "normal" : "tozero" },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: shapes(figure),
      annotations: annotations(figure),
      showlegend: Boolean(figure.legend),
    };
  }

  const holder = (figure) => document.getElementById(`plot-${figure.name}`);
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  function draw() {
    for (const figure of data.figures) {
      if (figure.lanes) holder(figure).style.height = `${58 + 30 * figure.lanes.length}px`;
      Plotly.react(holder(figure), figure.traces.map((given) => trace(given, figure)), layout(figure), config);
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
