use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::*;

/// The output of a parser for `pieces`, with adjacent contents joined.
fn parsed(format: ToolFormat, pieces: &[&str]) -> Vec<Piece> {
    let mut parser = ToolParser::new(format, vec!["f".into(), "add".into()]);
    let mut out = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    parser.finish(&mut out);
    let mut joined: Vec<Piece> = Vec::new();
    for piece in out {
        match (joined.last_mut(), piece) {
            (Some(Piece::Content(text)), Piece::Content(more)) => text.push_str(&more),
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

fn content(text: &str) -> Piece {
    Piece::Content(text.into())
}

fn call(name: &str, arguments: &str) -> Piece {
    Piece::Call(ToolCall { name: name.into(), arguments: arguments.into() })
}

#[test]
fn hermes_calls_are_found_anywhere() {
    let parse = |text: &str| parsed(ToolFormat::Hermes, &[text]);
    let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call>}\\\"\", \"y\": [1]}}\n</tool_call>";
    let f = call("f", "{\"x\": \"</tool_call>}\\\"\", \"y\": [1]}");
    assert_eq!(parse(one), std::slice::from_ref(&f));
    assert_eq!(parse(&format!("Let me see.\n{one}")), [content("Let me see."), f.clone()]);
    assert_eq!(parse(&format!("{one}\n{one}\n done ")), [f.clone(), f.clone(), content("done ")]);
    assert_eq!(parse("<tool_call>{\"name\": \"g\"}</tool_call>"), [call("g", "{}")]);
    assert_eq!(parse("<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}"), [call("f", "{\"a\": 1}")]);
    assert_eq!(parse("<tool_call>{\"name\": \"f\", \"arguments\": {}} </tool_c"), [call("f", "{}")]);
}

#[test]
fn llama_calls_are_the_whole_answer() {
    let parse = |text: &str| parsed(ToolFormat::Llama, &[text]);
    let one = "{\"name\": \"add\", \"parameters\": {\"a\": 1}}";
    let add = call("add", "{\"a\": 1}");
    assert_eq!(parse(one), std::slice::from_ref(&add));
    assert_eq!(parse(&format!("<|python_tag|>{one}; {one}\n{one}")), [add.clone(), add.clone(), add.clone()]);
    assert_eq!(parse(&format!(" {one} So be it.")), [add, content("So be it.")]);
    for plain in ["It is {\"name\": \"add\"}", "{\"name\": \"Bob\", \"parameters\": {}}", "{\"a\": 1} and", " 5", ""] {
        assert_eq!(parse(plain), [content(plain)].into_iter().filter(|p| *p != content("")).collect::<Vec<_>>());
    }
}

#[test]
fn lists_of_calls() {
    for (format, marks) in
        [(ToolFormat::Mistral, &["[TOOL_CALLS]", "[TOOL_CALLS] ", ""][..]), (ToolFormat::List, &[""])]
    {
        for mark in marks {
            let text = format!("{mark}[{{\"name\": \"f\", \"arguments\": {{}}}}, {{\"name\": \"add\", \"id\": 3}}]");
            assert_eq!(parsed(format, &[&text]), [call("f", "{}"), call("add", "{}")], "{text}");
        }
        for plain in ["[1, 2]", "[{\"name\": \"g\"}]", "[]", "[{}]", "[", "So: []", "[{\"name\": \"\"}]"] {
            assert_eq!(parsed(format, &[plain]), [content(plain)]);
        }
    }
    let later = "Well. [TOOL_CALLS][{\"name\": \"any\"}]";
    assert_eq!(parsed(ToolFormat::Mistral, &[later]), [content("Well."), call("any", "{}")]);
}

#[test]
fn what_is_no_call_is_content() {
    for text in [
        "<tool_call>",
        "<tool_call>\n",
        "a <tool_call> b",
        "<tool_call>{\"name\": \"f\", \"argu",
        "<tool_call>{name: f}</tool_call>",
        "<tool_call>{\"name\": 3}</tool_call> and",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>[{\"name\": \"f\"}]</tool_call>",
        "1 < 2 <tool",
        "</tool_call>",
        " \n",
        "\n\nfirst\n",
    ] {
        assert_eq!(parsed(ToolFormat::Hermes, &[text]), [content(text)]);
    }
    let deep = format!("<tool_call>{}{}", "{\"a\":".repeat(10_000), "}".repeat(10_000));
    assert_eq!(parsed(ToolFormat::Hermes, &[&deep]), [content(&deep)]);
}

/// However the text is cut into pieces, the parser finds the same calls and the same content, and loses nothing.
#[test]
fn pieces_of_any_length_give_the_same_calls() {
    const PARTS: &[&str] = &[
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "\n",
        " ",
        ";",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        "Où?",
        "<tool",
        "_call>",
        "\u{1f980}",
        "{\"name\": \"f\", \"arguments\": {\"a\": \"}\"}}",
        "[{\"name\": \"add\"}]",
        "{\"name\": \"g\", \"parameters\": {}}",
    ];
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut calls = 0;
    for _ in 0..20_000 {
        let format =
            *[ToolFormat::Hermes, ToolFormat::Llama, ToolFormat::Mistral, ToolFormat::List].choose(&mut rng).unwrap();
        let text: String = (0..rng.random_range(0..9)).map(|_| *PARTS.choose(&mut rng).unwrap()).collect();
        let whole = parsed(format, &[&text]);
        let (mut pieces, mut rest) = (Vec::new(), &text[..]);
        while !rest.is_empty() {
            let at = rest.char_indices().map(|(at, c)| at + c.len_utf8()).take(rng.random_range(1..6)).last().unwrap();
            pieces.push(&rest[..at]);
            rest = &rest[at..];
        }
        assert_eq!(parsed(format, &pieces), whole, "{format:?}: {pieces:?}");
        let found = whole.iter().filter(|piece| matches!(piece, Piece::Call(_))).count();
        calls += found;
        if found == 0 && !text.is_empty() {
            assert_eq!(whole, [content(&text)], "{format:?}");
        }
    }
    assert!(calls > 200, "only {calls} calls");
}

#[test]
fn formats_are_told_by_the_template() {
    let file = |name: &str| {
        let path = format!("{}/tests/fixtures/chat_template/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).expect("the fixture is there")
    };
    assert_eq!(ToolFormat::of_template(&file("qwen2.5_tools")), Some(ToolFormat::Hermes));
    for (source, format) in [
        ("{{ '[TOOL_CALLS] [' }}", Some(ToolFormat::Mistral)),
        ("[TOOL_CALLS]{{ name }}[ARGS]", None),
        ("<tool_call>\n<function=", None),
        ("<|start_header_id|> {\"name\": x, \"parameters\": y}", Some(ToolFormat::Llama)),
        ("<|start_header_id|>", None),
    ] {
        assert_eq!(ToolFormat::of_template(source), format, "{source}");
    }
    assert_eq!(ToolFormat::of_template(&file("smollm2")), None);
}
