// The one thing that moves on the page: a filter over the verdicts.
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
