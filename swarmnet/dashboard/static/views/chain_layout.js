/** The layout of the chart of chains: rows for hosts, curves for edges. Pure functions of the state. */

export const MAX_BARS = 28; // with more bars than this, hosts with similar spans are merged into one
const MAX_EDGES = 80;
const SAMPLES = 20; // points along a curve
const SERVING = new Set(["online", "leaving", "joining"]);

/**
 * Hosts of a model as bars in rows: {bars, rows, edges}; `rows` is the number of rows.
 * With more hosts than `most`, those with similar spans share a bar. A bar is {id, peers: [{id, …}], start, end, row}; `start` and `end` are blocks.
 * An edge is {id, source, target, positions_per_s, sessions}; source and target are bars, or null for clients.
 */
export function layout(hosts, flows, blocks, most = MAX_BARS) {
  const bars = assignRows(groupBySpan(hosts.filter((peer) => SERVING.has(peer.state)), blocks, most));
  const barOf = new Map(bars.flatMap((bar) => bar.peers.map((peer) => [peer.id, bar])));
  return { bars, rows: bars.reduce((n, bar) => Math.max(n, bar.row + 1), 0), edges: mergeEdges(flows, barOf) };
}

function groupBySpan(hosts, blocks, most) {
  if (hosts.length <= most) return hosts.map((peer) => bar(peer.id, [peer]));
  for (const parts of [blocks, 16, 12, 8, 6, 4, 2]) {
    const groups = new Map();
    for (const peer of hosts) {
      const [start, end] = peer.blocks.map((at) => Math.round((at * parts) / blocks));
      const id = `${start}:${end}`;
      groups.set(id, [...(groups.get(id) ?? []), peer]);
    }
    if (groups.size <= most || parts === 2) return [...groups].map(([id, peers]) => bar(id, peers));
  }
  return [];
}

function bar(id, peers) {
  const mean = (at) => peers.reduce((sum, peer) => sum + peer.blocks[at], 0) / peers.length;
  return { id, peers, start: mean(0), end: mean(1), row: 0 };
}

/** Gives each bar the first row with room. The order depends only on spans and ids, so that bars do not jump at every update. */
function assignRows(bars) {
  const ends = [];
  const order = (a, b) => a.start - b.start || b.end - a.end || (a.id < b.id ? -1 : 1);
  for (const each of [...bars].sort(order)) {
    const free = ends.findIndex((end) => end <= each.start + 0.01);
    each.row = free < 0 ? ends.length : free;
    ends[each.row] = each.end;
  }
  return bars;
}

function mergeEdges(flows, barOf) {
  const edges = new Map();
  for (const flow of flows) {
    const source = flow.source === "client" ? null : barOf.get(flow.source);
    const target = flow.target === "client" ? null : barOf.get(flow.target);
    if (source === undefined || target === undefined || source === target) continue;
    const id = `${source?.id ?? ""}>${target?.id ?? ""}`;
    const edge = edges.get(id) ?? { id, source, target, positions_per_s: 0, sessions: 0 };
    edge.positions_per_s += flow.positions_per_s;
    edge.sessions += flow.sessions;
    edges.set(id, edge);
  }
  return [...edges.values()].sort((a, b) => b.positions_per_s - a.positions_per_s).slice(0, MAX_EDGES);
}

/** The horizontal scale that the bar of blocks and the chains share, in pixels. */
export function scale(width, blocks) {
  const narrow = width < 560;
  const margin = narrow ? 14 : 62;
  const inner = Math.max(1, width - 2 * margin);
  return { narrow, margin, x: (block) => margin + (block / blocks) * inner, block: (x) => ((x - margin) / inner) * blocks };
}

/**
 * The path of an edge's positions: {curve: SVG path data, points: [[x, y, length so far], …]}, in pixels.
 * A curve from `from` to `enter`, then a straight line through the bar to `leave`, if given.
 */
export function edgePath(from, enter, leave) {
  const [x1, y1] = from;
  const [x2, y2] = enter;
  const bend = Math.max(18, Math.abs(x2 - x1) * 0.5);
  const [c1, c2] = [x1 + bend, x2 - bend];
  const points = [[x1, y1, 0]];
  const push = (x, y) => {
    const [px, py, length] = points.at(-1);
    points.push([x, y, length + Math.hypot(x - px, y - py)]);
  };
  for (let i = 1; i <= SAMPLES; i += 1) {
    const t = i / SAMPLES;
    const u = 1 - t;
    push(u ** 3 * x1 + 3 * u * u * t * c1 + 3 * u * t * t * c2 + t ** 3 * x2, y1 * (u ** 3 + 3 * u * u * t) + y2 * (3 * u * t * t + t ** 3));
  }
  if (leave) push(...leave);
  return { curve: `M${x1} ${y1}C${c1} ${y1} ${c2} ${y2} ${x2} ${y2}`, points };
}

/** The point at `distance` pixels along the points of a path. */
export function pointAt(points, distance) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][2] <= distance) low = middle;
    else high = middle;
  }
  const [x1, y1, d1] = points[low];
  const [x2, y2, d2] = points[high];
  const t = d2 === d1 ? 0 : Math.min(1, (distance - d1) / (d2 - d1));
  return [x1 + (x2 - x1) * t, y1 + (y2 - y1) * t];
}

/** How dots move on an edge: {speed: px/s, gap: px between dots}. Above 6 positions/s a dot stands for several. */
export function dotMotion(positions_per_s) {
  if (!(positions_per_s > 0)) return null;
  const speed = 40 + 34 * Math.log2(1 + positions_per_s);
  return { speed, gap: Math.max(14, speed / Math.min(6, positions_per_s)) };
}
