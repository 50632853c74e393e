"use strict";

const $ = (id) => document.getElementById(id);

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

class ServerError extends Error {}

// The key lives as long as the tab. It leaves only as a header to the server that the page came from.
const key = {
  get: () => sessionStorage.getItem("key"),
  set(value) {
    sessionStorage.setItem("key", value);
    this.show(false);
  },
  forget() {
    sessionStorage.removeItem("key");
    this.show(true);
  },
  show(wanted) {
    $("key-form").hidden = !wanted;
    $("forget").hidden = wanted || !this.get();
    if (wanted) $("key").focus();
  },
};

/** A response of the server. One that isn't well is thrown, with the server's own words. */
async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  // A header holds bytes, which fetch wants as characters: those of the key's UTF-8.
  if (key.get()) headers["X-API-Key"] = String.fromCharCode(...new TextEncoder().encode(key.get()));
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server can't be reached.");
  }
  if (response.ok || options.any) return response;
  if (response.status === 401 || response.status === 403) key.show(true);
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not ours: a proxy's page */ }
  throw Object.assign(new ServerError(`${message[0].toUpperCase()}${message.slice(1)}`), { status: response.status });
}

function setUpKey(start) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set($("key").value.trim());
    $("key").value = "";
    start();
  });
  $("forget").addEventListener("click", () => key.forget());
  key.show(false);
  start();
}
