//! The experts that requests give and ask for.

use crate::error::{Error, Result};
use crate::server::pb;
use crate::server::state::{ModelFacts, RoutingRules};
use crate::types::{ForcedRouting, RoutingFormat};

/// How the experts that tokens took are returned, if `wanted`.
///
/// # Errors
/// `InvalidArgument` for a dense model; `FailedPrecondition` if the server does not keep them.
pub(super) fn returned(wanted: bool, model: &ModelFacts) -> Result<Option<RoutingFormat>> {
    if !wanted {
        return Ok(None);
    }
    let RoutingRules { format, is_kept, .. } = rules("return_routing", model)?;
    if !is_kept {
        let message = "return_routing: the server does not keep the experts of tokens; start it with --return-routing";
        return Err(Error::FailedPrecondition(message.into()));
    }
    Ok(Some(*format))
}

/// Checks the experts that tokens of a sequence of `n` tokens are to take. `None` if there are none.
///
/// # Errors
/// `InvalidArgument` naming the wrong field below `path`.
pub(super) fn forced(path: &str, given: pb::Routing, n: usize, model: &ModelFacts) -> Result<Option<ForcedRouting>> {
    let pb::Routing { first_token, layers, top_k, experts } = given;
    if experts.is_empty() {
        return Ok(None);
    }
    let RoutingRules { format, .. } = rules(path, model)?;
    let is_shape = (layers as usize, top_k as usize) == (format.layers, format.top_k);
    ensure!(
        is_shape,
        path,
        "{top_k} experts of {layers} layers; this model takes {} of {}",
        format.top_k,
        format.layers
    );
    let (row, bytes) = (format.row_bytes(), experts.len());
    let path = format!("{path}.experts");
    ensure!(bytes.is_multiple_of(row), path, "{bytes} bytes; a token's experts are {row}");
    let (first, tokens) = (first_token as usize, bytes / row);
    ensure!(tokens <= n.saturating_sub(first), path, "{tokens} tokens from {first} on; the sequence has {n}");
    let all: Vec<u16> = format.read(&experts).collect();
    for (i, chosen) in all.chunks_exact(format.top_k).enumerate() {
        let (token, layer) = (first + i / format.layers, i % format.layers);
        for (place, expert) in chosen.iter().enumerate() {
            let is_there = usize::from(*expert) < format.experts;
            ensure!(is_there, path, "token {token}, layer {layer}: expert {expert} of {}", format.experts);
            let is_new = !chosen[..place].contains(expert);
            ensure!(is_new, path, "token {token}, layer {layer}: expert {expert} twice");
        }
    }
    Ok(Some(ForcedRouting::new(first, row, experts)))
}

fn rules<'a>(field: &str, model: &'a ModelFacts) -> Result<&'a RoutingRules> {
    model.routing.as_ref().ok_or_else(|| Error::invalid(field, "this model has no experts; leave it out"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(is_kept: bool) -> ModelFacts {
        let format = RoutingFormat { layers: 2, top_k: 2, experts: 4 };
        let routing = Some(RoutingRules { layers: vec![1, 2], format, is_kept, num_layers: 3 });
        ModelFacts { routing, ..ModelFacts::default() }
    }

    fn given(first_token: u32, layers: u32, top_k: u32, experts: &[u8]) -> pb::Routing {
        pb::Routing { first_token, layers, top_k, experts: experts.to_vec() }
    }

    #[test]
    fn experts_are_returned_where_they_are_kept() {
        assert_eq!(returned(false, &ModelFacts::default()).unwrap(), None);
        assert_eq!(returned(true, &model(true)).unwrap(), model(true).routing.map(|rules| rules.format));
        assert!(matches!(returned(true, &model(false)), Err(Error::FailedPrecondition(_))));
        let error = returned(true, &ModelFacts::default()).unwrap_err().to_string();
        assert_eq!(error, "return_routing: this model has no experts; leave it out");
    }

    #[test]
    fn forced_experts_are_checked() {
        let check = |given| forced("prompts[0].routing", given, 3, &model(false));
        assert_eq!(check(pb::Routing::default()).unwrap(), None);
        let rows = [0, 1, 2, 3, 3, 2, 1, 0];
        assert_eq!(check(given(1, 2, 2, &rows)).unwrap(), Some(ForcedRouting::new(1, 4, rows)));
        for (given, message) in [
            (given(1, 3, 2, &rows), "prompts[0].routing: 2 experts of 3 layers; this model takes 2 of 2"),
            (given(1, 2, 1, &rows), "prompts[0].routing: 1 experts of 2 layers; this model takes 2 of 2"),
            (given(1, 2, 2, &rows[1..]), "prompts[0].routing.experts: 7 bytes; a token's experts are 4"),
            (given(2, 2, 2, &rows), "prompts[0].routing.experts: 2 tokens from 2 on; the sequence has 3"),
            (
                given(u32::MAX, 2, 2, &rows),
                "prompts[0].routing.experts: 2 tokens from 4294967295 on; the sequence has 3",
            ),
            (given(0, 2, 2, &[0, 1, 4, 3]), "prompts[0].routing.experts: token 0, layer 1: expert 4 of 4"),
            (given(2, 2, 2, &[0, 0, 1, 3]), "prompts[0].routing.experts: token 2, layer 0: expert 0 twice"),
        ] {
            assert_eq!(check(given).unwrap_err().to_string(), message);
        }
        let error = forced("routing[1]", given(0, 2, 2, &rows), 3, &ModelFacts::default()).unwrap_err().to_string();
        assert_eq!(error, "routing[1]: this model has no experts; leave it out");
    }
}
