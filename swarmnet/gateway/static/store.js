/** Conversations and settings in this browser (localStorage). The oldest conversations go when there is no more room. */

const LIST = "swarmnet.chats";
const SETTINGS = "swarmnet.settings";
const MAX_CHATS = 100;
const MAX_CHARS = 3_000_000; // of all conversations; browsers give a page 5 million
const chatKey = (id) => `swarmnet.chat.${id}`;

/** Fields of a message that are stored: times of single tokens are too long. */
const KEPT = ["role", "content", "reasoning", "calls", "call_id", "name", "figures", "route", "error", "reason"];

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // storage is disabled, or somebody else wrote it
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = () => ({ ...read(SETTINGS, {}) });
export const saveSettings = (value) => write(SETTINGS, value);

/** {id, title, at, chars} of each conversation, the newest first. */
export const chats = () => {
  const list = read(LIST, []);
  return Array.isArray(list) ? list.filter((each) => typeof each?.id === "string") : [];
};

export function newChat() {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, title: "", messages: [] };
}

export function load(id) {
  const chat = read(chatKey(id), null);
  return Array.isArray(chat?.messages) ? chat : null;
}

/** Saves a conversation as the newest. Returns false if the browser has no room or storage is disabled. */
export function save(chat) {
  if (chat.deleted) return true; // its last answer ended after the reader deleted it
  const messages = chat.messages.map((message) => Object.fromEntries(KEPT.filter((name) => message[name] !== undefined).map((name) => [name, message[name]])));
  const kept = { id: chat.id, title: chat.title, messages };
  const entry = { id: chat.id, title: chat.title, at: Date.now(), chars: JSON.stringify(kept).length };
  const list = [entry, ...chats().filter((each) => each.id !== chat.id)];
  while (list.length > 1 && (list.length > MAX_CHATS || list.reduce((sum, each) => sum + (each.chars || 0), 0) > MAX_CHARS)) drop(list);
  while (!write(chatKey(chat.id), kept)) {
    if (list.length < 2) return false;
    drop(list);
  }
  return write(LIST, list);
}

function drop(list) {
  localStorage.removeItem(chatKey(list.pop().id));
}

export function remove(id) {
  write(LIST, chats().filter((each) => each.id !== id));
  try {
    localStorage.removeItem(chatKey(id));
  } catch {
    // Storage is disabled: nothing was kept.
  }
}
