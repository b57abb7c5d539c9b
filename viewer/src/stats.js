// Welch's t-test and the Wilcoxon rank-sum test as scanpy's rank_genes_groups defines them, for the genes that a page holds.

const TINY = 1e-300;
const LOG_ROOT_PI = 0.5 * Math.log(Math.PI); // the logarithm of gamma(1/2)
const FAR = 20;

// log(gamma(a + 1/2) / gamma(a)), by its series for large numbers; the difference of two logarithms would lose digits.
function logHalfStep(a) {
  let log = 0;
  for (; a < FAR; a++) log += Math.log(a / (a + 0.5));
  return log + 0.5 * Math.log(a) - 1 / (8 * a) + 1 / (192 * a ** 3) - 1 / (640 * a ** 5) + 17 / (14336 * a ** 7);
}

// The continued fraction of the incomplete beta function, by Lentz' method.
function betaFraction(a, b, x) {
  let c = 1;
  let d = 1 / Math.max(Math.abs(1 - ((a + b) * x) / (a + 1)), TINY);
  let h = d;
  for (let m = 1; m < 500; m++) {
    for (const step of [(m * (b - m) * x) / ((a + 2 * m - 1) * (a + 2 * m)), (-(a + m) * (a + b + m) * x) / ((a + 2 * m) * (a + 2 * m + 1))]) {
      d = 1 + step * d;
      c = 1 + step / c;
      d = 1 / (Math.abs(d) < TINY ? TINY : d);
      c = Math.abs(c) < TINY ? TINY : c;
      h *= d * c;
    }
    if (Math.abs(d * c - 1) < 1e-14) break;
  }
  return h;
}

// The regularized incomplete beta function of (a, 1/2) at x = 1 - y; both are given, because each may be close to 1.
function incompleteBeta(a, x, y) {
  if (!(x > 0)) return 0;
  if (!(y > 0)) return 1;
  const b = 0.5;
  const front = Math.exp(logHalfStep(a) - LOG_ROOT_PI + a * (x < 0.5 ? Math.log(x) : Math.log1p(-y)) + b * Math.log(y));
  return x < (a + 1) / (a + b + 2) ? (front * betaFraction(a, b, x)) / a : 1 - (front * betaFraction(b, a, y)) / b;
}

export function tPvalue(t, df) {
  return incompleteBeta(df / 2, df / (df + t * t), (t * t) / (df + t * t));
}

// Both tails of the normal distribution: the upper incomplete gamma function Q(1/2, z²/2).
export function normalPvalue(z) {
  const x = (z * z) / 2;
  if (x === 0) return 1;
  const front = Math.exp(-x + 0.5 * Math.log(x) - LOG_ROOT_PI);
  if (x < 1.5) {
    let term = 2;
    let sum = term;
    for (let n = 1; n < 200; n++) {
      term *= x / (0.5 + n);
      sum += term;
    }
    return 1 - front * sum;
  }
  let b = x + 0.5;
  let c = 1 / TINY;
  let d = 1 / b;
  let h = d;
  for (let i = 1; i < 500; i++) {
    const step = -i * (i - 0.5);
    b += 2;
    d = 1 / (step * d + b || TINY);
    c = b + step / c || TINY;
    h *= d * c;
    if (Math.abs(d * c - 1) < 1e-14) break;
  }
  return front * h;
}

function moments(values) {
  let sum = 0;
  let nonzero = 0;
  for (const value of values) {
    sum += value;
    if (value !== 0) nonzero++;
  }
  const mean = sum / values.length;
  let squares = 0;
  for (const value of values) squares += (value - mean) ** 2;
  return { n: values.length, mean, variance: squares / (values.length - 1), fraction: nonzero / values.length };
}

function welch(a, b) {
  const [x, y] = [a.variance / a.n, b.variance / b.n];
  const score = (a.mean - b.mean) / Math.sqrt(x + y);
  const df = (x + y) ** 2 / (x ** 2 / (a.n - 1) + y ** 2 / (b.n - 1));
  return { score, pval: tPvalue(score, df) };
}

function wilcoxon(group, reference) {
  const [own, other] = [Float64Array.from(group).sort(), Float64Array.from(reference).sort()];
  const [n, m] = [own.length, other.length];
  let sum = 0;
  let below = 0;
  let upTo = 0;
  for (const value of own) {
    while (below < m && other[below] < value) below++;
    upTo = Math.max(upTo, below);
    while (upTo < m && other[upTo] <= value) upTo++;
    sum += (below + upTo) / 2;
  }
  const score = (sum - (n * m) / 2) / Math.sqrt((n * m * (n + m + 1)) / 12);
  return { score, pval: normalPvalue(score) };
}

// Compare the values of one gene; null where fewer than two cells of a set have one.
export function compareValues(values, group, reference, method) {
  const known = (rows) => Float64Array.from(rows, (row) => values[row]).filter((value) => !Number.isNaN(value));
  const [own, other] = [known(group), known(reference)];
  if (own.length < 2 || other.length < 2) return null;
  const [a, b] = [moments(own), moments(other)];
  const { score, pval } = method === "wilcoxon" ? wilcoxon(own, other) : welch(a, b);
  const change = Math.log2((Math.expm1(a.mean) + 1e-9) / (Math.expm1(b.mean) + 1e-9));
  return { scores: score || 0, logfoldchanges: change, pvals: Number.isNaN(pval) ? 1 : pval, pct_nz_group: a.fraction, pct_nz_reference: b.fraction };
}

// Benjamini and Hochberg's adjustment, in the order given.
export function adjust(pvals) {
  const order = [...pvals.keys()].sort((i, j) => pvals[j] - pvals[i]);
  const adjusted = new Array(pvals.length);
  let least = 1;
  order.forEach((row, i) => {
    least = Math.min(least, (pvals[row] * pvals.length) / (pvals.length - i));
    adjusted[row] = least;
  });
  return adjusted;
}
