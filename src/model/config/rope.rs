//! Rotary position embedding: its parameters, and its frequencies as transformers computes them.

use serde_json::Value;

use crate::error::{Error, Result};

/// Rotary embedding of pairs `(i, i + rotary_dim / 2)` of the first `rotary_dim` dimensions of each head.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    pub theta: f64,
    pub scaling: RopeScaling,
    /// M-RoPE: how many frequencies take the position in time, how many that in rows and how many that in columns, one
    /// group behind the other. Empty if all take the one position that a token of text has.
    pub sections: Vec<usize>,
}

/// How the frequencies are changed for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth passage between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: usize,
    },
    /// Each pair's frequency divided by a factor of its own, `[rotary_dim / 2]`.
    Divisors(Vec<f32>),
}

impl RopeConfig {
    /// From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).
    ///
    /// # Errors
    /// `Config`: an unsupported kind of scaling by name, a parameter that is missing or out of range.
    pub fn parse(config: &Value) -> Result<Self> {
        let parameters = parameters(config);
        if parameters.as_object().is_some_and(|p| p.values().any(Value::is_object)) {
            return Err(Error::Config(
                "config.json: rope parameters that differ between layers are not supported".into(),
            ));
        }
        let theta =
            first_number(&[&parameters["rope_theta"], &config["rope_theta"]], "rope_theta")?.unwrap_or(10_000.0);
        if !(theta.is_finite() && theta > 0.0) {
            return Err(Error::Config(format!("config.json: rope_theta is {theta}; it must be positive")));
        }
        Ok(Self { theta, scaling: scaling(parameters)?, sections: sections(parameters)? })
    }

    /// For each frequency the axis of the position that it takes; empty without M-RoPE.
    pub fn axis_of(&self) -> Vec<u8> {
        (0..).zip(&self.sections).flat_map(|(axis, count)| std::iter::repeat_n(axis, *count)).collect()
    }

    /// Angle per position of each pair, `[rotary_dim / 2]`, in the float32 steps of transformers'
    /// `modeling_rope_utils`: the same bits, but where PyTorch's float32 power is one unit off the nearest float.
    ///
    /// The angle at position `p` is `p as f32 * inv_freq` in float32; its cosine and sine are taken in float32 too.
    ///
    /// # Panics
    /// If `Divisors` are not `rotary_dim / 2`.
    pub fn inv_freq(&self, rotary_dim: usize) -> Vec<f32> {
        let base = (0..rotary_dim).step_by(2).map(|i| {
            let exponent = i as f32 / rotary_dim as f32;
            // The power is rounded once, from float64.
            1.0 / (self.theta.powf(f64::from(exponent)) as f32)
        });
        match &self.scaling {
            RopeScaling::None => base.collect(),
            RopeScaling::Linear { factor } => base.map(|f| f / *factor as f32).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let context = *original_max_position as f64;
                base.map(|f| llama3(f, *factor, *low_freq_factor, *high_freq_factor, context)).collect()
            }
            RopeScaling::Divisors(divisors) => {
                assert_eq!(divisors.len(), rotary_dim / 2, "one rope divisor per pair");
                base.zip(divisors).map(|(f, divisor)| f / divisor).collect()
            }
        }
    }
}

/// How many of the first dimensions of each head are rotated: the share `partial_rotary_factor`, which is `default`
/// where the field is missing.
///
/// # Errors
/// `Config` if that is not an even number of them, or none.
pub(super) fn rotary_dim(config: &Value, head_dim: usize, default: f64) -> Result<usize> {
    let fields = [&parameters(config)["partial_rotary_factor"], &config["partial_rotary_factor"]];
    let factor = first_number(&fields, "partial_rotary_factor")?.unwrap_or(default);
    let rotated = (head_dim as f64 * factor) as usize;
    if rotated == head_dim || (2..head_dim).contains(&rotated) && rotated.is_multiple_of(2) {
        return Ok(rotated);
    }
    Err(Error::Config(format!(
        "config.json: partial_rotary_factor {factor} makes {rotated} of the {head_dim} dimensions of a head rotate; it \
         must be an even number of them"
    )))
}

/// The parameters of the rotary embedding that are together: `rope_parameters`, or `rope_scaling`.
fn parameters(config: &Value) -> &Value {
    let found = [&config["rope_scaling"], &config["rope_parameters"]].into_iter().find(|value| !value.is_null());
    found.unwrap_or(&Value::Null)
}

/// One frequency of `_compute_llama3_parameters`, rounded where PyTorch rounds: a Python number meets a float32 tensor
/// as a float32, and divided by a tensor is multiplied by its reciprocal.
fn llama3(inv_freq: f32, factor: f64, low: f64, high: f64, context: f64) -> f32 {
    let wavelength = inv_freq.recip() * std::f32::consts::TAU;
    if wavelength > (context / low) as f32 {
        return inv_freq / factor as f32;
    }
    if wavelength < (context / high) as f32 {
        return inv_freq;
    }
    let smooth = (wavelength.recip() * context as f32 - low as f32) / (high - low) as f32;
    (1.0 - smooth) * inv_freq / factor as f32 + smooth * inv_freq
}

fn scaling(parameters: &Value) -> Result<RopeScaling> {
    let kind = [&parameters["rope_type"], &parameters["type"]].into_iter().find_map(Value::as_str);
    let number = |name: &str| {
        let value = first_number(&[&parameters[name]], name)?;
        let value = value.ok_or_else(|| Error::Config(format!("config.json: the rope scaling has no {name}")))?;
        if value.is_finite() && value > 0.0 {
            return Ok(value);
        }
        Err(Error::Config(format!("config.json: {name} of the rope scaling is {value}; it must be positive")))
    };
    match kind {
        None if parameters.get("factor").is_some() => {
            Err(Error::Config("config.json: rope_scaling has a factor but no rope_type".into()))
        }
        // The frequencies of dynamic scaling are those without scaling up to `max_position_embeddings`, beyond which no
        // sequence is served.
        None | Some("default" | "dynamic" | "mrope") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: number("factor")? }),
        Some("llama3") => {
            let (low_freq_factor, high_freq_factor) = (number("low_freq_factor")?, number("high_freq_factor")?);
            if low_freq_factor >= high_freq_factor {
                return Err(Error::Config(format!(
                    "config.json: low_freq_factor {low_freq_factor} is not below high_freq_factor {high_freq_factor}"
                )));
            }
            let original_max_position = number("original_max_position_embeddings")? as usize;
            Ok(RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            })
        }
        Some("divisors") => {
            let list = parameters["divisors"].as_array().map_or(&[][..], Vec::as_slice);
            let divisors = list.iter().map(|v| v.as_f64().map(|d| d as f32).filter(|d| d.is_finite() && *d > 0.0));
            let divisors: Option<Vec<f32>> = divisors.collect();
            divisors.map(RopeScaling::Divisors).ok_or_else(|| Error::Config("a rope divisor is not positive".into()))
        }
        Some(kind @ ("longrope" | "su")) => Err(Error::Config(format!(
            "config.json: rope scaling {kind} is not supported, because its frequencies change with the length of the \
             sequence; serve a model for shorter contexts, such as Phi-3-mini-4k or Phi-4"
        ))),
        Some(other) => Err(Error::Config(format!(
            "config.json: rope scaling {other} is not supported; supported are default, dynamic, linear and llama3"
        ))),
    }
}

fn sections(parameters: &Value) -> Result<Vec<usize>> {
    let sections = &parameters["mrope_section"];
    if sections.is_null() {
        return Ok(Vec::new());
    }
    if parameters["mrope_interleaved"] == true {
        return Err(Error::Config("config.json: mrope_interleaved is not supported".into()));
    }
    let wrong = || Error::Config(format!("config.json: mrope_section is {sections}; it must be a list of numbers"));
    let list = sections.as_array().ok_or_else(wrong)?;
    list.iter().map(|count| count.as_u64().map(|count| count as usize)).collect::<Option<_>>().ok_or_else(wrong)
}

/// The first of the fields that is there and not null.
fn first_number(values: &[&Value], name: &str) -> Result<Option<f64>> {
    let Some(value) = values.iter().find(|v| !v.is_null()) else { return Ok(None) };
    let number = value.as_f64();
    number.map(Some).ok_or_else(|| Error::Config(format!("config.json: {name} is {value}, not a number")))
}
