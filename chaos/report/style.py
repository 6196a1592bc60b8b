"""How the page looks, and the one thing that moves on it: a filter over the verdicts."""

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --raised: #f4f6f8; --ink: #1b2228; --soft: #56616b;
  --line: #d3dae0; --held: #1a7037; --broken: #b3261e; --unrecovered: #8a5300; --skipped: #56616b;
  --training: #7fb2e5; --recovering: #f0b429; --lost-back: #f7d4d1; --lost-line: #b3261e; --ended: #dfe4e8;
  --focus: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ground: #11161b; --raised: #1a2128; --ink: #e4e9ed; --soft: #a3afba;
  --line: #36414b; --held: #58c27d; --broken: #ff8a80; --unrecovered: #f0b557; --skipped: #a3afba;
  --training: #35679a; --recovering: #a87406; --lost-back: #4a2323; --lost-line: #ff8a80; --ended: #2a343d;
  --focus: #7db7f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem clamp(1rem, 4vw, 2.5rem) 4rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 2px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .25rem 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .75rem; }
h3 { font-size: 1rem; margin: 0; display: inline; }
code { font: .875rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; }
.verdict { margin: 0; font-weight: 700; }
.verdict::before { content: ""; display: inline-block; width: .7em; height: .7em; margin-right: .5em;
  background: currentColor; border-radius: 50%; }
.held { color: var(--held); } .broken { color: var(--broken); }
.unrecovered { color: var(--unrecovered); } .skipped { color: var(--skipped); }
.counts { list-style: none; display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; padding: 0;
  margin: 1.5rem 0 0; }
.counts li { background: var(--raised); border-left: 4px solid; border-radius: 4px; padding: .5rem .75rem; }
.counts b { font-size: 1.5rem; } .counts small { display: block; color: var(--soft); line-height: 1.3; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; margin: 0 0 1rem;
  font-size: .875rem; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: .4rem; }
figure { margin: 1.25rem 0 .25rem; } figcaption { font-weight: 600; margin-bottom: .4rem; overflow-wrap: anywhere; }
.lane { display: grid; grid-template-columns: 8rem 1fr; align-items: center; }
.lane-name { font-size: .875rem; color: var(--soft); overflow-wrap: anywhere; padding-right: .5rem; }
.lane svg, .axis { display: block; overflow: visible; }
.axis { margin-left: 8rem; width: calc(100% - 8rem); }
.axis line { stroke: var(--soft); } .axis text { fill: var(--soft); font-size: 12px; }
.span.training { fill: var(--training); } .span.recovering { fill: var(--recovering); }
.span.ended { fill: var(--ended); } .span.lost { fill: url(#hatch); }
.hatch-back { fill: var(--lost-back); } .hatch-line { fill: var(--lost-line); }
.mark { stroke: var(--ink); stroke-width: 2; fill: var(--ground); }
.mark.fault { stroke: var(--broken); stroke-width: 3.5; } .mark.commit { stroke: var(--held); }
.when { display: inline-block; min-width: 4.5rem; font-variant-numeric: tabular-nums; color: var(--soft); }
ol { padding-left: 0; list-style: none; font-size: .875rem; }
details { margin: .5rem 0; } summary { cursor: pointer; padding: .35rem 0; }
summary span { color: var(--soft); font-size: .875rem; }
.filter { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; } .filter[hidden] { display: none; }
input { font: inherit; color: inherit; background: var(--ground); border: 1px solid var(--soft); border-radius: 4px;
  padding: .35rem .5rem; min-width: 0; flex: 1 1 12rem; max-width: 24rem; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; color: var(--ink); }
th, td { text-align: left; vertical-align: top; padding: .45rem .75rem .45rem 0; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
thead th { color: var(--soft); font-weight: 500; border: 0; overflow-wrap: normal; }
tbody th { width: 24%; font-weight: 600; } .detail { white-space: pre-line; }
.seconds { font-variant-numeric: tabular-nums; }
@media (max-width: 44rem) {
  .counts { grid-template-columns: 1fr 1fr; } .lane { grid-template-columns: 1fr; }
  .axis { margin-left: 0; width: 100%; }
  table, tbody, tr, tbody th, td { display: block; width: auto; } thead { position: absolute; clip-path: inset(50%); }
  tr { border-top: 1px solid var(--line); padding: .6rem 0; } tr[hidden] { display: none; }
  tbody th, td { border: 0; padding: .1rem 0; } td:empty { display: none; }
  .seconds::after { content: " s"; } }
@media print { body { max-width: none; } .filter { display: none; } }
"""

SCRIPT = """
const field = document.getElementById("filter"), shown = document.getElementById("shown");
const rows = [...document.querySelectorAll("tbody tr")].map(row => [row, row.textContent.toLowerCase()]);
field.parentElement.hidden = rows.length === 0;
const groups = [...document.querySelectorAll("details.group")].map(group => [group, group.open]);
field.addEventListener("input", () => {
  const wanted = field.value.trim().toLowerCase();
  let count = 0;
  for (const [row, text] of rows) { row.hidden = !text.includes(wanted); count += !row.hidden; }
  for (const [group, open] of groups) {
    const any = group.querySelector("tbody tr:not([hidden])") !== null;
    group.hidden = !any;
    group.open = wanted ? any : open;
  }
  shown.textContent = wanted ? `${count} of ${rows.length}` : "";
});
"""
