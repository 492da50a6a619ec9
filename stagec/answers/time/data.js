// The data of `stagec time --html`, as the page uses them: entries become arrays when they are first
// looked at; the pieces of a class that are on a stream are a lane.
const picture = data.picture;
const kinds = picture.kinds;
const [TITLE, OP, KIND, PART, BYTES, FLOPS, KERNEL, SLOT, STREAM] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const COMPUTE = 0;
const entries = new Array(picture.entries.length);

// An entry: nodes with their starts and ends after the base; of each stream the nodes on it, from
// when to when, and the time of each kind.
function entryOf(number) {
  if (entries[number]) return entries[number];
  const flat = picture.entries[number], count = flat.length / 3;
  const found = { nodes: new Int32Array(count), starts: new Float64Array(count), ends: new Float64Array(count), streams: new Map() };
  for (let i = 0, at = 0; i < count; i += 1) {
    at += flat[3 * i + 1];
    found.nodes[i] = flat[3 * i];
    found.starts[i] = at;
    found.ends[i] = at + flat[3 * i + 2];
    const row = picture.nodes[flat[3 * i]];
    for (let s = STREAM; s < row.length; s += 1) addTo(found, row[s], i, row[KIND]);
  }
  for (const on of found.streams.values()) on.places.sort((a, b) => found.starts[a] - found.starts[b]);
  return (entries[number] = found);
}

function addTo(entry, stream, place, kind) {
  let on = entry.streams.get(stream);
  if (!on) entry.streams.set(stream, (on = { places: [], first: Infinity, last: -Infinity, share: new Map() }));
  on.places.push(place);
  on.first = Math.min(on.first, entry.starts[place]);
  on.last = Math.max(on.last, entry.ends[place]);
  on.share.set(kind, (on.share.get(kind) || 0) + entry.ends[place] - entry.starts[place]);
}

// The lanes of a class: by stream the pieces that are on it, in the order of time.
function lanesOf(each) {
  if (each.lanes) return each.lanes;
  const lanes = new Map(), flat = each.pieces;
  for (let i = 0, base = 0; i < flat.length; i += 3) {
    base += flat[i];
    const entry = entryOf(flat[i + 1]);
    for (const [stream, on] of entry.streams) {
      if (!lanes.has(stream)) lanes.set(stream, { bases: [], firsts: [], lasts: [], entries: [], microbatches: [] });
      const lane = lanes.get(stream);
      lane.bases.push(base);
      lane.firsts.push(base + on.first);
      lane.lasts.push(base + on.last);
      lane.entries.push(flat[i + 1]);
      lane.microbatches.push(flat[i + 2]);
    }
  }
  if (!lanes.has(COMPUTE)) lanes.set(COMPUTE, { bases: [], firsts: [], lasts: [], entries: [], microbatches: [] });
  return (each.lanes = lanes);
}

// What the compute stream of a class waits for between and in its pieces.
function waitsOf(each) {
  if (each.idle) return each.idle;
  const found = { starts: [], ends: [], parts: [] };
  for (let i = 0, at = 0; i < each.waits.length; i += 3) {
    at += each.waits[i];
    found.starts.push(at);
    at += each.waits[i + 1];
    found.ends.push(at);
    found.parts.push(each.waits[i + 2]);
  }
  return (each.idle = found);
}

function memoryOf(each) {
  if (!each.memory) return null;
  if (!each.held) {
    const summed = (steps) => { let now = 0; return Float64Array.from(steps, (step) => (now += step)); };
    each.held = { times: summed(each.memory.times), bytes: summed(each.memory.bytes) };
  }
  return each.held;
}

// The last place of numbers that increase at which one is not above what is wanted; -1 for none.
function lastUpTo(numbers, wanted) {
  let low = -1, high = numbers.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (numbers[middle] <= wanted) low = middle; else high = middle - 1;
  }
  return low;
}

// What is on a lane at a time, or next to it within `near`: a node, its piece and its times.
function nodeAt(lane, stream, time, near) {
  let best = null;
  const middle = lastUpTo(lane.firsts, time + near);
  for (let i = middle; i >= 0 && i > middle - 4; i -= 1) {
    if (lane.lasts[i] < time - near) continue;
    const entry = entryOf(lane.entries[i]);
    for (const place of entry.streams.get(stream).places) {
      const start = lane.bases[i] + entry.starts[place], end = lane.bases[i] + entry.ends[place];
      const away = time < start ? start - time : time > end ? time - end : 0;
      if (away > near) continue;
      const better = best === null || away < best.away || (away === best.away && end - start > best.end - best.start);
      if (better) best = { away, start, end, row: picture.nodes[entry.nodes[place]], piece: i };
    }
    if (best && best.away === 0) break;
  }
  return best;
}

function microbatchesOf(lane, piece) {
  return picture.microbatches[lane.microbatches[piece]];
}
