//! Prometheus' text format, version 0.0.4.

use std::fmt::{Display, Write as _};

use super::number::Histogram;

/// Prefix of the names that only this server has.
const OURS: &str = "rollout:";
/// Prefix of vLLM's names.
const VLLM: &str = "vllm:";

/// Text in Prometheus' format, written metric by metric.
#[derive(Debug, Default)]
pub(super) struct Exposition<'a> {
    text: String,
    hides_ours: bool,
    /// Name of vLLM's label `model_name`. While it is there, the names have vLLM's prefix for [`OURS`], and the values
    /// vLLM's labels and bounds.
    pub vllm_model: Option<&'a str>,
    /// Prefix and rest of the name of the current metric: the one that was begun last.
    name: (&'static str, &'static str),
    /// Whether the current metric is left out.
    is_hidden: bool,
}

impl Exposition<'_> {
    /// An empty text; `shows_ours` is false if metrics whose names begin with [`OURS`] are left out.
    pub fn new(shows_ours: bool) -> Self {
        Self { hides_ours: !shows_ours, ..Self::default() }
    }

    /// Begins a metric with its type and its help text.
    pub fn begin(&mut self, name: &'static str, kind: &str, help: &str) {
        let stem = name.strip_prefix(OURS);
        self.name = match (stem, self.vllm_model) {
            (Some(stem), Some(_)) => (VLLM, stem),
            (Some(stem), None) => (OURS, stem),
            (None, _) => ("", name),
        };
        self.is_hidden = self.name.0 == OURS && self.hides_ours;
        if !self.is_hidden {
            let (prefix, stem) = self.name;
            let _ = writeln!(self.text, "# HELP {prefix}{stem} {help}\n# TYPE {prefix}{stem} {kind}");
        }
    }

    /// Writes a counter or a gauge that has one value and no labels of its own.
    pub fn single(&mut self, name: &'static str, kind: &str, help: &str, value: impl Display) {
        self.begin(name, kind, help);
        self.sample(&[], value);
    }

    /// Writes a value of the current metric.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.line("", labels, None, value);
    }

    /// Writes a histogram of the current metric.
    pub fn histogram(&mut self, labels: &[(&str, &str)], histogram: &Histogram) {
        self.histogram_up_to(u64::MAX, labels, histogram);
    }

    /// The same, of whose bounds vLLM has none above `most`.
    pub fn histogram_up_to(&mut self, most: u64, labels: &[(&str, &str)], histogram: &Histogram) {
        if self.is_hidden {
            return;
        }
        let bounds = match self.vllm_model {
            Some(_) => &histogram.shown.vllm[..histogram.shown.vllm.partition_point(|&bound| bound <= most)],
            None => histogram.shown.ours,
        };
        let (below, count) = histogram.cumulative(bounds);
        for (bound, number) in below {
            // vLLM's bounds have a point, and Prometheus compares them as texts.
            let bound = if self.vllm_model.is_some() { format!("{bound:?}") } else { bound.to_string() };
            self.line("_bucket", labels, Some(&bound), number);
        }
        self.line("_bucket", labels, Some("+Inf"), count);
        self.line("_sum", labels, None, histogram.sum());
        self.line("_count", labels, None, count);
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], bound: Option<&str>, value: impl Display) {
        if self.is_hidden {
            return;
        }
        let (prefix, stem) = self.name;
        let _ = write!(self.text, "{prefix}{stem}{suffix}");
        let of_vllm = self.vllm_model.map(|model| [("model_name", model), ("engine", "0")]);
        let of_vllm = of_vllm.into_iter().flatten();
        let mut separator = '{';
        for (name, value) in of_vllm.chain(labels.iter().copied()).chain(bound.map(|bound| ("le", bound))) {
            let _ = write!(self.text, "{separator}{name}=\"");
            escape(&mut self.text, value);
            self.text.push('"');
            separator = ',';
        }
        self.text.push_str(if separator == '{' { " " } else { "} " });
        let _ = writeln!(self.text, "{value}");
    }

    pub fn into_text(self) -> String {
        self.text
    }
}

/// Appends a label's value, with backslashes, quotes and line feeds escaped.
fn escape(text: &mut String, value: &str) {
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::metrics::number::{Bounds, Unit};

    const BOUNDS: Bounds = Bounds { ours: &[1, 2], vllm: &[2, 5, 50] };

    #[test]
    fn the_text_is_prometheus_format() {
        let mut text = Exposition::new(true);
        text.single("a_total", "counter", "What a is.", 3);
        text.begin("b", "gauge", "What b is.");
        text.sample(&[("model", "a\"b\\c\nd"), ("x", "")], 0.5);
        let histogram = Histogram::new(Unit::Count, BOUNDS);
        histogram.count(2);
        histogram.count(7);
        text.begin("c", "histogram", "What c is.");
        text.histogram(&[("kind", "k")], &histogram);
        let expected = "# HELP a_total What a is.\n# TYPE a_total counter\na_total 3\n\
                        # HELP b What b is.\n# TYPE b gauge\nb{model=\"a\\\"b\\\\c\\nd\",x=\"\"} 0.5\n\
                        # HELP c What c is.\n# TYPE c histogram\n\
                        c_bucket{kind=\"k\",le=\"1\"} 0\nc_bucket{kind=\"k\",le=\"2\"} 1\n\
                        c_bucket{kind=\"k\",le=\"+Inf\"} 2\nc_sum{kind=\"k\"} 9\nc_count{kind=\"k\"} 2\n";
        assert_eq!(text.into_text(), expected);
    }

    #[test]
    fn names_are_hidden_or_vllms() {
        let histogram = Histogram::new(Unit::Count, BOUNDS);
        histogram.count(3);
        let mut text = Exposition::new(false);
        text.single("rollout:a", "gauge", "What a is.", 3);
        text.begin("rollout:b", "histogram", "What b is.");
        text.histogram(&[], &histogram);
        text.single("process_c", "gauge", "What c is.", 4);
        text.vllm_model = Some("m\"");
        text.begin("rollout:b", "histogram", "What b is.");
        text.histogram_up_to(49, &[("x", "y")], &histogram);
        let expected = "# HELP process_c What c is.\n# TYPE process_c gauge\nprocess_c 4\n\
                        # HELP vllm:b What b is.\n# TYPE vllm:b histogram\n\
                        vllm:b_bucket{model_name=\"m\\\"\",engine=\"0\",x=\"y\",le=\"2.0\"} 0\n\
                        vllm:b_bucket{model_name=\"m\\\"\",engine=\"0\",x=\"y\",le=\"5.0\"} 1\n\
                        vllm:b_bucket{model_name=\"m\\\"\",engine=\"0\",x=\"y\",le=\"+Inf\"} 1\n\
                        vllm:b_sum{model_name=\"m\\\"\",engine=\"0\",x=\"y\"} 3\n\
                        vllm:b_count{model_name=\"m\\\"\",engine=\"0\",x=\"y\"} 1\n";
        assert_eq!(text.into_text(), expected);
    }
}
