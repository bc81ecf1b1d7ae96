//! What requests want beside log-probabilities, and whether replies have it.

use rollout_server::server::pb;

use super::dice::Dice;
use super::rollout::adapter;
use super::sampling::VOCABULARY;

/// Fields that are valid where the request names no other tokens, and wrong ones where it is hostile.
pub fn returns(dice: &mut Dice) -> pb::Returns {
    let support = dice.coin();
    let limits = [0, 1, 4096, 65_536];
    pb::Returns {
        entropy: dice.coin(),
        support,
        max_support_ids: if support || dice.is_hostile() { dice.maybe(|dice| dice.pick(&limits)) } else { None },
        top: if dice.coin() { 0 } else { dice.between(0, VOCABULARY.min(1024)) },
        top_of: if dice.is_hostile() { dice.below(5) as i32 - 1 } else { dice.below(3) as i32 },
        top_as_bfloat16: dice.coin(),
        references: Vec::new(),
        base: false,
        current: false,
        divergences: false,
    }
}

/// With the policies under which completions are scored as well.
pub fn returns_of_completions(dice: &mut Dice) -> pb::Returns {
    let current = dice.is_hostile() && dice.coin();
    pb::Returns { current, ..returns_of_scores(dice) }
}

/// With the policies under which sequences are scored as well.
pub fn returns_of_scores(dice: &mut Dice) -> pb::Returns {
    let references = match dice.below(6) {
        0 => vec![String::new()],
        1 => vec![adapter(dice)],
        2 if dice.is_hostile() => vec![adapter(dice); 1 + dice.below(10)],
        _ => Vec::new(),
    };
    let base = dice.is_hostile() && dice.coin();
    let divergences = dice.coin() && (dice.is_hostile() || !references.is_empty());
    pb::Returns { references, base, divergences, ..returns(dice) }
}

/// Checks that all arrays have one value or row for each of `tokens` tokens, the first `skipped` of which have none.
pub fn check(
    asked: Option<&pb::Returns>,
    returned: Option<&pb::Returned>,
    tokens: usize,
    skipped: usize,
) -> Result<(), String> {
    let asked = asked.cloned().unwrap_or_default();
    let none = pb::Returned::default();
    let arrays = returned.unwrap_or(&none);
    let expect = |what: &str, found: usize, asked: bool, each: usize| {
        let expected = if asked { tokens * each } else { 0 };
        if found == expected { Ok(()) } else { Err(format!("{what}: {found}, not {expected} for {tokens} tokens")) }
    };
    let is_asked = asked.entropy || asked.support || asked.top > 0;
    expect("Returned", usize::from(returned.is_some()) * tokens, is_asked, 1)?;
    expect("entropies", arrays.entropies.len(), asked.entropy, 1)?;
    expect("raw_entropies", arrays.raw_entropies.len(), asked.entropy, 1)?;
    expect("support_sizes", arrays.support_sizes.len(), asked.support, 1)?;
    expect("support_log_masses", arrays.support_log_masses.len(), asked.support, 1)?;
    expect("top_ids", arrays.top_ids.len(), asked.top > 0, 4 * asked.top as usize)?;
    let value_bytes = if asked.top_as_bfloat16 { 2 } else { 4 };
    expect("top_logprobs", arrays.top_logprobs.len(), asked.top > 0, value_bytes * asked.top as usize)?;
    let limit = asked.max_support_ids.unwrap_or(4096);
    let listed = arrays.support_sizes.iter().filter(|size| **size <= limit).sum::<u32>() as usize;
    if arrays.support_ids.len() != 4 * listed {
        return Err(format!("{} bytes of ids for supports of {listed} tokens", arrays.support_ids.len()));
    }
    let entropies = [&arrays.entropies, &arrays.raw_entropies];
    let wrong = |value: &&f32| !(value.is_finite() && **value >= 0.0);
    if let Some(value) = entropies.into_iter().filter_map(|list| list.get(skipped..)).flatten().find(wrong) {
        return Err(format!("{value} is no entropy"));
    }
    let masses = arrays.support_log_masses.get(skipped..).unwrap_or_default();
    match masses.iter().find(|mass| !(mass.is_finite() && **mass <= 0.0)) {
        Some(mass) => Err(format!("{mass} is no log of a probability")),
        None => Ok(()),
    }
}
