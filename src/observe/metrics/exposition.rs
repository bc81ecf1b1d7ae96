//! Prometheus' text format, version 0.0.4.

use std::fmt::{Display, Write as _};

use super::number::Histogram;

/// Text in Prometheus' format, written metric by metric.
#[derive(Debug, Default)]
pub(super) struct Exposition {
    text: String,
    /// Name of the current metric: the one that was begun last.
    name: &'static str,
}

impl Exposition {
    /// Begins a metric with its type and its help text.
    pub fn begin(&mut self, name: &'static str, kind: &str, help: &str) {
        self.name = name;
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Writes a counter or a gauge that has one value and no labels.
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
        let (below, count) = histogram.cumulative();
        for (bound, number) in below {
            self.line("_bucket", labels, Some(&bound.to_string()), number);
        }
        self.line("_bucket", labels, Some("+Inf"), count);
        self.line("_sum", labels, None, histogram.sum());
        self.line("_count", labels, None, count);
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], bound: Option<&str>, value: impl Display) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        let mut separator = '{';
        for (name, value) in labels.iter().copied().chain(bound.map(|bound| ("le", bound))) {
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
    use crate::observe::metrics::number::{SAMPLES, Unit};

    #[test]
    fn the_text_is_prometheus_format() {
        let mut text = Exposition::default();
        text.single("a_total", "counter", "What a is.", 3);
        text.begin("b", "gauge", "What b is.");
        text.sample(&[("model", "a\"b\\c\nd"), ("x", "")], 0.5);
        let histogram = Histogram::new(Unit::Count, &SAMPLES[..2]);
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
}
