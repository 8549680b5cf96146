// The page that shows panels with Grafana's own components (Apache-2.0): theme, panel frame, lines, legend, units,
// thresholds, mappings. `window.draw` draws one panel; `draw_panels.mjs` takes its picture.
//
// Grafana's server, its data source and its state timeline are not on npm. So the queries' steps and the states'
// bars are made here, after Grafana's documentation.
import '@fontsource/inter/latin-400.css';
import '@fontsource/inter/latin-500.css';
import { FieldType, ThemeContext, ThresholdsMode, createTheme, dateTime, getDisplayProcessor,
  getFieldDisplayName, getFieldMatcher } from '@grafana/data';
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

const theme = createTheme({ colors: { mode: 'light' } });
const GREEN_BELOW_80 = { mode: ThresholdsMode.Absolute,
  steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] };
// What a panel has that says nothing else, by its kind.
const DEFAULTS = {
  timeseries: { color: { mode: 'palette-classic' } },
  stat: { color: { mode: 'thresholds' } },
  'state-timeline': { color: { mode: 'continuous-GrYlRd' } },
};
const LINES = { drawStyle: 'line', lineWidth: 1, fillOpacity: 0, gradientMode: 'none', lineInterpolation: 'linear',
  pointSize: 5, showPoints: 'auto', spanNulls: false, axisPlacement: 'auto', axisGridShow: undefined,
  stacking: { mode: 'none', group: 'A' }, scaleDistribution: { type: 'linear' } };

// The step that Grafana asks for: a round one, not below the scrape interval.
const STEPS = [1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600];
function stepOf(range, points, scrape) {
  const least = (range.to - range.from) / points;
  return Math.max(scrape, STEPS.find((step) => step >= least) ?? 3600);
}

async function ask(target, panel, { range, scrape, variables, width }) {
  const step = stepOf(range, width, scrape);
  const values = { ...variables, __rate_interval: `${Math.max(step + scrape, 4 * scrape)}s` };
  const query = target.expr.replace(/\$(\w+)/g, (all, name) => values[name] ?? all);
  // Both ends are multiples of the step: then every answer is on the same grid.
  const start = Math.floor(range.from / step) * step;
  const words = new URLSearchParams({ query, start, end: range.to, step });
  const answer = await (await fetch(`/api/v1/query_range?${words}`)).json();
  if (answer.status !== 'success') throw new Error(`${panel.title}: ${answer.error}`);
  return answer.data.result.map((series) => frameOf(series, target, panel, { start, end: range.to, step }));
}

// One series as a frame on the grid of steps; a step without a sample is a gap.
function frameOf({ metric, values }, target, panel, { start, end, step }) {
  const known = new Map(values.map(([at, value]) => [Math.round(at * 1000), Number(value)]));
  const times = [], numbers = [];
  for (let at = start; at <= end; at += step) {
    times.push(at * 1000);
    const value = known.get(at * 1000);
    numbers.push(value === undefined || Number.isNaN(value) ? null : value);
  }
  const displayNameFromDS = target.legendFormat.replace(/{{\s*(\w+)\s*}}/g, (_, label) => metric[label] ?? '');
  const { custom, ...defaults } = panel.fieldConfig.defaults;
  const config = { thresholds: GREEN_BELOW_80, ...DEFAULTS[panel.type], ...defaults, displayNameFromDS,
    custom: { ...LINES, ...custom } };
  const field = { name: 'Value', type: FieldType.number, values: numbers, labels: metric, config };
  const time = { name: 'Time', type: FieldType.time, values: times, config: {} };
  return { refId: target.refId, length: times.length, fields: [time, field] };
}

// The panel's overrides of one field, found by Grafana's own matchers.
function override(frame, frames, panel) {
  const field = frame.fields[1];
  for (const { matcher, properties } of panel.fieldConfig.overrides) {
    if (!getFieldMatcher(matcher)(field, frame, frames)) continue;
    for (const { id, value } of properties) {
      const [first, second] = id.split('.');
      if (second) field.config[first][second] = value;
      else field.config[first] = value;
    }
  }
}

// What Grafana does to all fields of a panel before it shows them.
function prepare(frames, panel) {
  for (const frame of frames) override(frame, frames, panel);
  const all = frames.flatMap((frame) => frame.fields[1].values).filter((value) => value !== null);
  frames.forEach((frame, seriesIndex) => {
    const [time, field] = frame.fields;
    const min = field.config.min ?? Math.min(...all), max = field.config.max ?? Math.max(...all);
    field.state = { seriesIndex, range: { min, max, delta: max - min } };
    for (const each of [time, field]) each.display = getDisplayProcessor({ field: each, theme, timeZone: 'utc' });
    field.state.displayName = getFieldDisplayName(field, frame, frames);
  });
  return frames;
}

function Lines({ frames, panel, range, width, height }) {
  const timeRange = { from: dateTime(range.from * 1000), to: dateTime(range.to * 1000), raw: { from: 'a', to: 'b' } };
  const legend = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [], ...panel.options?.legend };
  return <TimeSeries {...{ frames, timeRange, legend, width, height }} timeZone="utc" options={panel.options ?? {}} />;
}

function Numbers({ frames, width, height }) {
  const each = Math.floor(width / frames.length);
  return <div style={{ display: 'flex' }}>{frames.map(({ fields: [time, field] }, i) => {
    const value = field.display(field.values.findLast((number) => number !== null));
    value.title = frames.length > 1 ? field.state.displayName : undefined;
    const sparkline = { x: time, y: field };
    return <BigValue key={i} value={value} width={each} height={height} theme={theme} sparkline={sparkline}
      colorMode={BigValueColorMode.Value} graphMode={BigValueGraphMode.Area} />;
  })}</div>;
}

const boxStyle = (left, top, width, height, more) => ({ position: 'absolute', overflow: 'hidden', whiteSpace: 'nowrap',
  left, top, width, height, lineHeight: `${height}px`, boxSizing: 'border-box', ...more });

// The stretches of a series in which its text stays the same.
function barsOf({ fields: [time, field] }, end) {
  const out = [];
  field.values.forEach((value, i) => {
    const { text, color } = value === null ? { text: null } : field.display(value);
    if (out.at(-1)?.text !== text) out.push({ text, color, from: time.values[i] });
    out.at(-1).to = time.values[i + 1] ?? end;
  });
  return out.filter((bar) => bar.text !== null);
}

// Rows of bars below each other, their names on the left.
function States({ frames, range, width, height }) {
  const titles = frames.map((frame) => frame.fields[1].state.displayName);
  const names = Math.min(width * 0.45, 8 + 6.6 * Math.max(...titles.map((title) => title.length)));
  const row = (height - 24) / frames.length;
  const left = (at) => names + ((at / 1000 - range.from) / (range.to - range.from)) * (width - names);
  const minutes = Math.ceil((range.to - range.from) / 60 / 6) * 60;
  const marks = [];
  for (let at = Math.ceil(range.from / minutes) * minutes; at < range.to; at += minutes) marks.push(at * 1000);
  return <div style={{ position: 'relative', fontSize: 12, height }}>
    {titles.map((title, i) => <div key={title} style={boxStyle(0, i * row, names - 8, row, { textAlign: 'right' })}>
      {title}</div>)}
    {frames.map((frame, i) => barsOf(frame, range.to * 1000).map(({ from, to, text, color }) => {
      const wide = Math.max(1, left(to) - left(from));
      const more = { background: color, color: theme.colors.getContrastText(color), paddingLeft: 4 };
      return <div key={`${i} ${from}`} style={boxStyle(left(from), (i + 0.05) * row, wide, row * 0.9, more)}>
        {wide > 8 + text.length * 7 ? text : ''}</div>;
    }))}
    {marks.map((at) => <div key={at} style={boxStyle(left(at), height - 20, 40, 20)}>
      {new Date(at).toISOString().slice(11, 16)}</div>)}
  </div>;
}

const KINDS = { timeseries: Lines, stat: Numbers, 'state-timeline': States };
const Nothing = ({ panel }) => <div style={{ color: theme.colors.text.secondary, textAlign: 'center', paddingTop: 60 }}>
  {panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;

const root = createRoot(document.getElementById('root'));

// Draw a panel; returns how many series it has.
window.draw = async (panel, where) => {
  const found = await Promise.all(panel.targets.map((target) => ask(target, panel, where)));
  const frames = prepare(found.flat(), panel);
  const Kind = frames.length ? KINDS[panel.type] : Nothing;
  if (!Kind) throw new Error(`${panel.title}: panels of kind ${panel.type} are not known here`);
  root.render(<ThemeContext.Provider value={theme}><GlobalStyles isExtensionSidebarOpen={false} />
    <PanelChrome key={panel.title} title={panel.title} width={where.width} height={where.height}>
      {(width, height) => <Kind {...{ frames, panel, width, height, range: where.range }} />}
    </PanelChrome></ThemeContext.Provider>);
  await document.fonts.ready;
  return frames.length;
};
