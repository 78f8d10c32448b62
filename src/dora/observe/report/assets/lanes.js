// What the timeline is made of: lanes, ages and stripes.

// Who decodes in which lane: the first one that is free. Returns [{from, to, version, request, lane}] by start.
function inLanes(track) {
  const { t, d, v, r } = track.spans;
  const ends = [];
  return t.map((from, i) => {
    let lane = ends.findIndex((end) => end <= from);
    if (lane < 0) lane = ends.length;
    ends[lane] = from + d[i];
    return { from, to: from + d[i], version: v[i], request: r[i], lane };
  });
}

// The newest version at a time (ms), by when each was published.
function newestAt(published, time) {
  let [low, high] = [0, published.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (published[middle] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// Stripes, for what waits.
function hatch(pen, line, ground) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.fillStyle = ground;
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = line;
  brush.globalAlpha = 0.7;
  brush.beginPath();
  for (const at of [-8, 0, 8]) { brush.moveTo(at, 8); brush.lineTo(at + 8, 0); }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}
