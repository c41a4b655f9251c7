// The API key, for servers that require one. It is stored for this tab only.
const NAME = "headway-key";

export function setKey(key) {
  sessionStorage.setItem(NAME, key);
}

export function hasKey() {
  return Boolean(sessionStorage.getItem(NAME));
}

export function authorized(options = {}) {
  const key = sessionStorage.getItem(NAME);
  if (!key) return options;
  return { ...options, headers: { ...options.headers, Authorization: `Bearer ${key}` } };
}
