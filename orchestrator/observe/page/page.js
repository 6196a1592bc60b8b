"use strict";
// Asks the server for the page's changing part once a second and takes over what differs, node by node, so that focus,
// selection and scroll positions stay. All text comes escaped from the server; nothing here makes markup of it.
(() => {
  const EVERY_MS = 1000, PATIENCE_MS = 5000;
  let main = document.querySelector("main");
  let behindMs = 0, lostAt = null;

  function take(old, fresh) {
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
      old.replaceWith(document.importNode(fresh, true));
      return;
    }
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    for (const name of old.getAttributeNames()) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const name of fresh.getAttributeNames()) {
      const value = fresh.getAttribute(name);
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    if (old.id === "connection") return;
    const before = [...old.childNodes], after = [...fresh.childNodes];
    after.forEach((node, index) => {
      if (index < before.length) take(before[index], node);
      else old.append(document.importNode(node, true));
    });
    before.slice(after.length).forEach((node) => node.remove());
  }

  function begun() {
    behindMs = Date.now() - 1000 * Number(main.dataset.now);
    document.title = main.dataset.title + " - lastgood";
  }

  function connected(yes) {
    const told = document.getElementById("connection");
    if (yes) {
      lostAt = null;
      told.hidden = true;
      if (told.textContent) told.textContent = "";
      return;
    }
    lostAt = lostAt ?? Date.now();
    told.hidden = false;
    const at = new Date(lostAt).toISOString().slice(11, 19);
    const text = `No answer since ${at} UTC: what is shown is of then. The run has ended, or its coordinator is being ` +
      "restarted; `lastgood status` on its directory tells.";
    if (told.textContent !== text) told.textContent = text;
  }

  function words(seconds) {
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s ago`;
    if (s < 3600) return `${Math.floor(s / 60)} min${s % 60 ? ` ${s % 60} s` : ""} ago`;
    const m = Math.round(s / 60);
    if (m < 1440) return `${Math.floor(m / 60)} h${m % 60 ? ` ${m % 60} min` : ""} ago`;
    const hours = Math.floor((m % 1440) / 60);
    return `${Math.floor(m / 1440)} d${hours ? ` ${hours} h` : ""} ago`;
  }

  function age() {
    const now = (Date.now() - behindMs) / 1000;
    for (const one of document.querySelectorAll("[data-ago]")) {
      const text = words(now - Number(one.dataset.ago));
      if (one.textContent !== text) one.textContent = text;
    }
  }

  async function ask() {
    if (!document.hidden) {
      try {
        const answer = await fetch("main", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
        if (!answer.ok) throw new Error(String(answer.status));
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
        if (fresh === null) throw new Error("not the page");
        take(main, fresh);
        begun();
        connected(true);
      } catch {
        connected(false);
      }
      age();
    }
    setTimeout(ask, EVERY_MS);
  }

  document.addEventListener("visibilitychange", age);
  begun();
  setTimeout(ask, EVERY_MS);
})();
