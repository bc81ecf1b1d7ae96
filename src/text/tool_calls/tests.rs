use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::*;

/// The output of a parser for `pieces`, with adjacent contents joined.
fn parsed(format: ToolFormat, pieces: &[&str]) -> Vec<Piece> {
    parsed_and_counted(format, pieces).0
}

/// The same, and what has become of the calls.
fn parsed_and_counted(format: ToolFormat, pieces: &[&str]) -> (Vec<Piece>, ToolCallCounts) {
    let schema = r#"{"properties": {"a": {"type": "integer"}, "code": {"type": "string"}}}"#;
    let tools = ["f", "add"].map(|name| KnownTool::new(name.into(), schema));
    let mut parser = ToolParser::new(format, tools.into());
    let mut out = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    let counts = parser.finish(&mut out);
    let mut joined: Vec<Piece> = Vec::new();
    for piece in out {
        match (joined.last_mut(), piece) {
            (Some(Piece::Content(text)), Piece::Content(more)) => text.push_str(&more),
            (_, piece) => joined.push(piece),
        }
    }
    (joined, counts)
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

#[test]
fn functions_are_found_between_marks() {
    let parse = |text: &str| parsed(ToolFormat::Qwen3Coder, &[text]);
    let one = "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n<parameter=code>\nif x:\n\n  y\n</parameter>\n</function>\n</tool_call>";
    let f = call("f", "{\"a\": 7, \"code\": \"if x:\\n\\n  y\"}");
    assert_eq!(parse(one), std::slice::from_ref(&f));
    assert_eq!(
        parse(&format!("Let me see.\n{one}\n{one}\n done ")),
        [content("Let me see."), f.clone(), f, content("done ")]
    );
    for (text, arguments) in [
        ("<tool_call><function=add></function></tool_call>", "{}"),
        ("<tool_call><function=add><parameter=a>1</parameter></function>", "{\"a\": 1}"),
        ("<tool_call><function=add><parameter=code></parameter></function></tool_c", "{\"code\": \"\"}"),
        ("<tool_call><function=add><parameter=a>1\n</function></tool_call>", "{\"a\": 1}"),
        (
            "<tool_call><function=add><parameter=code></parameter></tool_call> </ </function> <parameter=a></parameter></function></tool_call>",
            "{\"code\": \"</parameter></tool_call> </ </function> <parameter=a>\"}",
        ),
        (
            "<tool_call><function=add><parameter=b>1</parameter><parameter=b>2</parameter></function></tool_call>",
            "{\"b\": \"2\"}",
        ),
    ] {
        assert_eq!(parse(text), [call("add", arguments)], "{text}");
    }
    for plain in [
        "<function=add></function>",
        "<tool_call>{\"name\": \"f\"}</tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=add><parameter=a>1",
        "<tool_call><function=add><parameter=a>1</function>",
        "<tool_call><function=add><parameter=a>1</parameter> and </function></tool_call>",
        "<tool_call><function=add>7</function></tool_call>",
        "<tool_call><function=add\n></function></tool_call>",
        "<tool_call><function=a<b></function></tool_call>",
    ] {
        assert_eq!(parse(plain), [content(plain)]);
    }
}

#[test]
fn calls_are_counted_by_what_becomes_of_them() {
    let counts = |parsed, unknown_tool, invalid, unclosed| ToolCallCounts { parsed, unknown_tool, invalid, unclosed };
    let hermes = "<tool_call>{\"name\": \"f\"}</tool_call>";
    for (format, text, expected) in [
        (ToolFormat::Hermes, format!("{hermes}{hermes}"), counts(2, 0, 0, 0)),
        (ToolFormat::Hermes, "Nothing of that.".into(), counts(0, 0, 0, 0)),
        (ToolFormat::Hermes, hermes.replace("\"f\"", "\"g\""), counts(0, 1, 0, 0)),
        (ToolFormat::Hermes, hermes.replace("\"f\"", "f") + hermes, counts(1, 0, 1, 0)),
        (ToolFormat::Hermes, format!("<tool_call>f</tool_call>{hermes}"), counts(1, 0, 1, 0)),
        (ToolFormat::Hermes, format!("{hermes}<tool_call>{{\"na"), counts(1, 0, 0, 1)),
        (ToolFormat::Hermes, "Well <tool_call>\n".into(), counts(0, 0, 0, 1)),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f></function></tool_call>".into(), counts(1, 0, 0, 0)),
        (ToolFormat::Qwen3Coder, "<tool_call><function=g></function></tool_call>".into(), counts(0, 1, 0, 0)),
        (ToolFormat::Qwen3Coder, hermes.into(), counts(0, 0, 1, 0)),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f><para".into(), counts(0, 0, 0, 1)),
        (ToolFormat::Llama, "{\"name\": \"g\"}".into(), counts(0, 0, 1, 0)),
        (ToolFormat::Llama, "<|python_tag|>{\"name\": \"g\"}".into(), counts(0, 1, 0, 0)),
        (ToolFormat::Llama, "{\"name\": \"f\", ".into(), counts(0, 0, 0, 1)),
        (ToolFormat::Llama, "{\"answer\": 3}{\"a".into(), counts(0, 0, 0, 0)),
        (ToolFormat::Mistral, "[{\"name\": \"f\"}, {\"name\": \"add\"}]".into(), counts(2, 0, 0, 0)),
        (ToolFormat::Mistral, "[TOOL_CALLS][{\"name\": \"f\"}, {\"name\": \"g\"}]".into(), counts(1, 1, 0, 0)),
        (ToolFormat::Mistral, "[1, 2]".into(), counts(0, 0, 0, 0)),
    ] {
        let pieces: Vec<String> = text.chars().map(String::from).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        for pieces in [&[&text[..]][..], &pieces] {
            assert_eq!(parsed_and_counted(format, pieces).1, expected, "{format:?}: {text}");
        }
    }
}

/// However the text is cut into pieces, the parser finds the same calls and the same content, and loses nothing.
#[test]
fn pieces_of_any_length_give_the_same_calls() {
    use ToolFormat::{Hermes, List, Llama, Mistral, Qwen3Coder};

    const FORMATS: &[ToolFormat] = &[Hermes, Qwen3Coder, Llama, Mistral, List];
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
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<tool_call><function=add><parameter=a>",
    ];
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut calls = 0;
    for _ in 0..20_000 {
        let format = *FORMATS.choose(&mut rng).unwrap();
        let text: String = (0..rng.random_range(0..9)).map(|_| *PARTS.choose(&mut rng).unwrap()).collect();
        let (whole, counts) = parsed_and_counted(format, &[&text]);
        let (mut pieces, mut rest) = (Vec::new(), &text[..]);
        while !rest.is_empty() {
            let at = rest.char_indices().map(|(at, c)| at + c.len_utf8()).take(rng.random_range(1..6)).last().unwrap();
            pieces.push(&rest[..at]);
            rest = &rest[at..];
        }
        assert_eq!(parsed_and_counted(format, &pieces), (whole.clone(), counts), "{format:?}: {pieces:?}");
        let found = whole.iter().filter(|piece| matches!(piece, Piece::Call(_))).count();
        assert_eq!(counts.parsed + counts.unknown_tool, found as u64, "{format:?}: {pieces:?}");
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
        ("<tool_call>\n<function=", Some(ToolFormat::Qwen3Coder)),
        ("<tool_call>{name}<arg_key>", None),
        ("<|start_header_id|> {\"name\": x, \"parameters\": y}", Some(ToolFormat::Llama)),
        ("<|start_header_id|>", None),
    ] {
        assert_eq!(ToolFormat::of_template(source), format, "{source}");
    }
    assert_eq!(ToolFormat::of_template(&file("smollm2")), None);
}
