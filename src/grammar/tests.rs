use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::error::Error;
use crate::text::Tokenizer;
use crate::types::{SamplingParams, TokenId, TokenMask};

/// Number of logits in a row of the fixture's model: more than the tokenizer has tokens.
const LOGITS: usize = 512;
const EOS: TokenId = 2;

fn tokenizer() -> Arc<Tokenizer> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer/tokenizer.json");
    Arc::new(Tokenizer::from_file(&file).unwrap())
}

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(tokenizer())
}

fn regex(text: &str) -> GrammarSource {
    GrammarSource::Regex(text.into())
}

fn unlimited() -> MaskBudget {
    MaskBudget::of(Duration::MAX)
}

fn lark(text: &str) -> GrammarSource {
    GrammarSource::Lark(text.into())
}

fn schema(text: impl Into<String>) -> GrammarSource {
    GrammarSource::JsonSchema(text.into())
}

fn refusal(compiler: &GrammarCompiler, source: &GrammarSource) -> String {
    match compiler.compile(source, LOGITS, &[EOS]) {
        Err(Error::InvalidArgument { message, .. }) => message,
        other => panic!("{source:?}: {other:?}"),
    }
}

/// The tokens that may come next where not every token may.
fn mask(state: &GrammarState) -> &TokenMask {
    state.mask().expect("a mask")
}

/// Feeds allowed tokens that `choose` picks, until the text may end or `most` tokens were fed.
fn walk(
    state: &mut GrammarState,
    most: usize,
    mut choose: impl FnMut(&[TokenId]) -> TokenId,
) -> Result<Vec<TokenId>, String> {
    let mut taken = Vec::new();
    for _ in 0..most {
        let tokens: Vec<TokenId> = mask(state).tokens().filter(|token| *token != EOS).collect();
        if tokens.is_empty() {
            break;
        }
        taken.push(choose(&tokens));
        state.advance(&taken).map_err(|error| format!("{error:?}"))?;
    }
    Ok(taken)
}

#[test]
fn a_mask_has_the_tokens_that_some_text_goes_on_with() {
    let (tokenizer, compiler) = (tokenizer(), compiler());
    let choices = ["the", "that", "than the rest", "beautiful", "be", "été"].map(String::from);
    let grammar = compiler.compile(&GrammarSource::Choice(choices.to_vec()), LOGITS, &[EOS]).unwrap();
    let mut open = vec![(grammar.start(), Vec::new())];
    let mut seen = 0;
    while let Some((state, text)) = open.pop() {
        for token in 0..LOGITS as TokenId {
            let next = [&text[..], &tokenizer.bytes(token)].concat();
            let has_text = next.len() > text.len() && !tokenizer.is_special(token);
            let goes_on = has_text && choices.iter().any(|choice| choice.as_bytes().starts_with(&next));
            let ends = token == EOS && choices.iter().any(|choice| choice.as_bytes() == text);
            assert_eq!(state.allows(token), goes_on || ends, "{token} after {text:?}");
            if goes_on {
                let mut state = state.clone();
                state.advance(&[token]).unwrap();
                open.push((state, next));
                seen += 1;
            }
        }
    }
    assert!(seen > 100, "{seen}");
}

#[test]
fn the_masks_after_drafts_are_those_of_the_tokens() {
    let grammar = compiler().compile(&regex("(ab|ac)*d"), LOGITS, &[EOS]).unwrap();
    let tokens: Vec<TokenId> = tokenizer().encode("ababacab", false).unwrap();
    let (start, mut state) = (grammar.start(), grammar.start());
    let masks = start.masks_after(&tokens, &mut unlimited());
    assert_eq!(masks.len(), tokens.len());
    for (token, mask) in tokens.iter().zip(&masks) {
        assert!(state.advance(&[*token]).unwrap() >= GrammarState::BYTES_PER_TOKEN);
        assert_eq!(state.mask(), mask.as_ref());
    }
    assert_eq!(start.mask(), grammar.start().mask(), "a look ahead changes nothing");
    let wrong = [&tokens[..2], &tokenizer().encode("zz", false).unwrap(), &tokens[2..]].concat();
    assert_eq!(start.masks_after(&wrong, &mut unlimited()), masks[..2], "up to the first one that is forbidden");
    let complete = tokenizer().encode("abd", false).unwrap();
    let ended = [&complete[..], &[EOS], &tokens].concat();
    assert_eq!(start.masks_after(&ended, &mut unlimited()).len(), complete.len(), "an end is not tried");
}

#[test]
fn a_grammar_waits_for_the_end_of_the_reasoning() {
    const OPEN: TokenId = 300;
    const CLOSE: TokenId = 301;
    let grammar = compiler().compile(&regex("ab"), LOGITS, &[EOS]).unwrap();
    let text = tokenizer().encode("ab", false).unwrap();
    let first: Vec<TokenId> = mask(&grammar.start()).tokens().collect();
    assert!(!first.contains(&OPEN) && !first.contains(&CLOSE));
    for (is_open, reasoning) in [
        (true, &[5, OPEN, EOS + 1, CLOSE][..]),
        (true, &[CLOSE]),
        (false, &[OPEN, 5, OPEN, 7, CLOSE]),
        (false, &[OPEN, CLOSE]),
        (false, &[]),
    ] {
        let start = grammar.after_reasoning(OPEN, CLOSE, is_open).start();
        let sequence = [reasoning, &text].concat();
        let (mut here, mut there, mut lost) = (start.clone(), start.clone(), start.clone());
        let masks = start.masks_after(&sequence, &mut unlimited());
        assert_eq!(masks.len(), sequence.len(), "{sequence:?}");
        if !is_open {
            let mut expected = [&first[..], &[OPEN]].concat();
            expected.sort_unstable();
            assert_eq!(mask(&start).tokens().collect::<Vec<_>>(), expected);
        }
        for (i, token) in sequence.iter().enumerate() {
            assert!(here.allows(*token), "{sequence:?} at {i}");
            let grown = here.advance_within(*token, &mut unlimited()).unwrap().expect("in time");
            there.advance(&sequence[..=i]).unwrap();
            lost.lose();
            lost.advance(&sequence[..=i]).unwrap();
            assert_eq!(grown == 0, i < reasoning.len(), "the reasoning takes no memory");
            assert_eq!(here.mask().is_none(), i + 1 < reasoning.len(), "{sequence:?} at {i}");
            for state in [&there, &lost] {
                assert_eq!(state.mask(), here.mask(), "{sequence:?} at {i}");
            }
            assert_eq!(here.mask(), masks[i].as_ref(), "{sequence:?} at {i}");
            if i + 1 == reasoning.len() {
                assert_eq!(mask(&here).tokens().collect::<Vec<_>>(), first, "then the text begins");
            }
            assert!(here.goes_on(&SamplingParams::default(), &sequence[..=i]));
        }
        assert_eq!(mask(&here).tokens().collect::<Vec<_>>(), [EOS]);
    }
}

#[test]
fn a_grammar_can_have_the_reasoning_itself() {
    let grammar = compiler().compile(&regex("a.*"), LOGITS, &[EOS]).unwrap();
    let [a] = tokenizer().encode("a", false).unwrap()[..] else { panic!("one token") };
    let state = grammar.after_reasoning(a, a + 1, false).start();
    assert_eq!(state.mask(), grammar.start().mask(), "it sees the mark");
    assert!(grammar.after_reasoning(a, a + 1, true).start().mask().is_none(), "unless the prompt has it");
}

#[test]
fn parameters_may_leave_no_token() {
    let compiler = compiler();
    let grammar = compiler.compile(&regex("a"), LOGITS, &[EOS]).unwrap();
    let [a] = tokenizer().encode("a", false).unwrap()[..] else { panic!("one token") };
    let only = |tokens: &[TokenId]| SamplingParams { allowed_tokens: Some(tokens.to_vec()), ..Default::default() };
    assert!(grammar.can_start(&SamplingParams::default()) && grammar.can_start(&only(&[a])));
    assert!(!grammar.can_start(&only(&[a + 1])));
    let mut state = grammar.start();
    state.advance(&[a]).unwrap();
    assert_eq!(mask(&state).tokens().collect::<Vec<_>>(), [EOS]);
    let late = SamplingParams { min_tokens: 2, eos_token_ids: vec![EOS], ..Default::default() };
    assert!(state.goes_on(&late, &[a, a]) && !state.goes_on(&late, &[a]) && !state.goes_on(&only(&[a]), &[a]));
    let without_end = compiler.compile(&regex("a"), LOGITS, &[]).unwrap();
    let mut state = without_end.start();
    state.advance(&[a]).unwrap();
    assert!(!state.goes_on(&SamplingParams::default(), &[a]));
}

#[test]
fn what_is_wrong_is_refused_with_its_reason() {
    let compiler = compiler();
    for (source, reason) in [
        (regex(""), "is empty"),
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex(&"a".repeat(200_000)), "200000 bytes are more than 131072"),
        (schema("{"), "is not JSON"),
        (schema("3"), "is no JSON schema"),
        (schema("false"), "Unsatisfiable"),
        (schema(r#"{"$ref": "http://localhost/x.json"}"#), "Default retriever does not fetch"),
        (schema("[".repeat(1000)), "recursion limit"),
        (GrammarSource::Choice(vec![]), "0 choices"),
        (GrammarSource::Choice(vec![String::new()]), "choice 0 is empty"),
        (GrammarSource::Choice(vec!["a".into(); 5000]), "5000 choices"),
        (lark("begin: \"a\""), "start"),
        (lark("start: a\na[temperature=0.5]: /[a-z]+/"), "temperature= is not supported"),
        (lark("start: a\na [max_tokens=3, temperature = 1]: /[a-z]+/"), "temperature= is not supported"),
        (schema(patterns(400)), "400 patterns"),
        (schema(format!(r#"{{"properties":{{"a":{}}}}}"#, patterns(400))), "400 patterns"),
        (schema(format!(r#"{{"allOf":[{},{0},{0}]}}"#, patterns(60))), "180 patterns"),
        (lark(&format!("start: %json {}", patterns(400))), "400 patterns"),
    ] {
        let message = refusal(&compiler, &source);
        assert!(message.contains(reason), "{source:?}: {message}");
        assert!(message.len() < 600 && !message.contains('\n') && !message.contains("verbose"), "{message:?}");
    }
}

/// A schema with `n` patterns for names, no two of which match the same name.
fn patterns(n: usize) -> String {
    let patterns = (0..n).map(|i| format!(r#""^p{i}_[a-z]+$":{{"type":"integer"}}"#)).collect::<Vec<_>>();
    format!(r#"{{"type":"object","patternProperties":{{{}}}}}"#, patterns.join(","))
}

#[test]
fn what_is_not_wrong_is_taken() {
    let compiler = compiler();
    for source in [
        schema(r#"{"$schema":"http://json-schema.org/schema#","type":"object","properties":{"a":{"type":"string"}}}"#),
        schema(r#"{"$schema":"urn:my-registry","type":"integer"}"#),
        schema(r#"{"$schema":"http://json-schema.org/draft-07/schema#","type":"integer"}"#),
        schema(patterns(40)),
        lark("start: \"temperature=\" /[0-9]+ temperature=/ // temperature=1\n# temperature=1\n"),
        lark("start: temperature\ntemperature: \"a\""),
    ] {
        compiler.compile(&source, LOGITS, &[EOS]).unwrap_or_else(|error| panic!("{source:?}: {error}"));
    }
}

/// A mask is the same on every thread, even if an earlier attempt to compute it was cancelled.
#[test]
fn a_mask_that_is_computed_later_is_the_same() {
    let compiler = compiler();
    for source in [
        regex(r"\p{L}{3,20}[!?]"),
        schema(r#"{"type":"object","properties":{"a":{"type":"string","minLength":30}},"required":["a"]}"#),
        lark("start: a+\na: \"x\"? a? \"x\"?"),
    ] {
        let grammar = compiler.compile(&source, LOGITS, &[EOS]).unwrap();
        let (mut here, mut there, mut lost) = (grammar.start(), grammar.start(), grammar.start());
        let mut outputs = Vec::new();
        for step in 0..20 {
            let tokens: Vec<TokenId> = mask(&here).tokens().filter(|token| *token != EOS).collect();
            let Some(&token) = tokens.get(step * 7 % tokens.len().max(1)) else { break };
            outputs.push(token);
            here.advance(&outputs).unwrap();
            assert_eq!(there.advance_within(token, &mut MaskBudget::of(Duration::ZERO)), Ok(None), "no time, no mask");
            if step % 3 == 0 {
                lost.lose();
            }
            for state in [&mut there, &mut lost] {
                state.advance(&outputs).unwrap();
                assert_eq!(state.mask(), here.mask(), "{source:?} after {outputs:?}");
            }
        }
        assert!(outputs.len() > 5, "{source:?}");
    }
}

/// The samples of a request share one allowance of time. The first sample that exceeds it ends the request with an
/// error that allows a retry, because no count measures how ambiguous a grammar is.
#[test]
fn the_samples_of_a_request_share_their_time() {
    let grammar = compiler().compile(&lark("start: start start | \"a\""), LOGITS, &[EOS]).unwrap();
    let (mut first, mut second) = (grammar.start(), grammar.start());
    let token = mask(&first).tokens().find(|token| *token != EOS).unwrap();
    let mut outputs = vec![token];
    let error = loop {
        match first.advance(&outputs) {
            Ok(_) => outputs.push(token),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, GrammarError::TooMuchTime(_)), "{error:?} after {} tokens", outputs.len());
    let ended = second.advance(&outputs[..1]);
    assert!(matches!(ended, Err(GrammarError::TooMuchTime(_))), "{ended:?}");
}

/// Grammars that would take much time or memory are rejected when they are compiled or, at the latest, when one of
/// their masks exceeds a limit. Until then they take no more than the limits allow.
#[test]
fn bombs_are_refused() {
    let compiler = compiler();
    let names = |n: usize| (0..n).map(|i| format!("\"p{i}\"")).collect::<Vec<_>>();
    let optional = names(3000).iter().map(|name| format!("{name}:{{}}")).collect::<Vec<_>>().join(",");
    let either = |i: usize| {
        let one = |name: &str| format!(r#"{{"type":"object","properties":{{"{name}{i}":{{"type":"integer"}}}}}}"#);
        format!(r#"{{"anyOf":[{},{}]}}"#, one("a"), one("b"))
    };
    let all_of = |n: usize| format!(r#"{{"allOf":[{}]}}"#, (0..n).map(either).collect::<Vec<_>>().join(","));
    let deep = format!("{}a{}", "(".repeat(20_000), ")*".repeat(20_000));
    for source in [
        regex("((((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100})"),
        regex(&deep),
        schema(format!(r#"{{"type":"object","properties":{{{optional}}}}}"#)),
        schema(all_of(8)),
        schema(all_of(16)),
        schema(r#"{"type":"integer","multipleOf":999983}"#),
        schema(r#"{"allOf":[{"multipleOf":0.97},{"multipleOf":101},{"multipleOf":103}]}"#),
        lark(r#"start: %json {"type":"integer","multipleOf":999983}"#),
        lark(&format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000))),
        lark("start: start start | \"a\""),
        lark("start: a+\na: \"x\"? a? \"x\"?"),
        lark("start: e\ne: e e e | e e | \"a\" | \"b\" | "),
        lark("start: a\na: b\nb: a"),
        schema(r##"{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}"##),
    ] {
        let name: String = format!("{source:?}").chars().take(80).collect();
        let outcome = match compiler.compile(&source, LOGITS, &[EOS]) {
            Err(Error::InvalidArgument { message, .. }) => message,
            Err(other) => panic!("{name}: {other}"),
            Ok(grammar) if !grammar.can_start(&SamplingParams::default()) => "nothing can begin".into(),
            Ok(grammar) => walk(&mut grammar.start(), 5000, |tokens| tokens[0]).expect_err(&name),
        };
        println!("{name}: {outcome}");
    }
}

#[test]
fn large_grammars_of_real_sizes_are_taken() {
    let compiler = compiler();
    let values = (0..2000).map(|i| format!("\"value {i}\"")).collect::<Vec<_>>().join(",");
    let properties = (0..100).map(|i| format!("\"p{i}\":{{\"type\":\"integer\"}}")).collect::<Vec<_>>().join(",");
    let mut nested = String::from(r#"{"type":"string"}"#);
    for _ in 0..30 {
        nested = format!(r#"{{"type":"object","properties":{{"a":{nested}}},"required":["a"]}}"#);
    }
    for source in [
        schema(format!(r#"{{"enum":[{values}]}}"#)),
        schema(format!(r#"{{"type":"object","properties":{{{properties}}}}}"#)),
        schema(nested),
        schema(r##"{"type":"object","properties":{"children":{"type":"array","items":{"$ref":"#"}}}}"##),
        schema(r#"{"type":"number","multipleOf":0.01}"#),
        regex(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}"),
        GrammarSource::JsonObject,
    ] {
        let grammar = compiler.compile(&source, LOGITS, &[EOS]).expect("real grammars are of this size");
        let mut seed = 88_172_645_463_325_252u64;
        let tokens = walk(&mut grammar.start(), 200, |tokens| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            tokens[(seed % tokens.len() as u64) as usize]
        });
        assert!(!tokens.expect("within the limits").is_empty());
    }
}

#[test]
fn what_a_request_learns_of_a_grammar_is_its_own() {
    let compiler = compiler();
    let source = schema(r#"{"type":"string","minLength":50}"#);
    let first = compiler.compile(&source, LOGITS, &[EOS]).unwrap();
    let fresh = first.bytes();
    walk(&mut first.start(), 100, |tokens| tokens[tokens.len() / 2]).unwrap();
    assert!(first.bytes() > fresh);
    assert_eq!(compiler.compile(&source, LOGITS, &[EOS]).unwrap().bytes(), fresh);
}
