//! Templates and chats that would exhaust memory, time or the stack.

use super::*;

const TOO_MUCH: &str = "the chat template makes more than 268435456 bytes";
const TOO_MANY: &str = "the chat template makes a list of more than 100000 elements";

/// Asserts that the template is rejected and that no bytes stay charged. Returns the message of the error.
fn refused(source: &str, room: &Traffic) -> String {
    let error = template(source).render(nothing(), room).expect_err(source);
    assert_eq!(room.used(), 0, "{source}");
    assert!(matches!(error, Error::InvalidArgument { .. } | Error::ResourceExhausted(_)), "{source}: {error:?}");
    error.to_string()
}

/// A template that repeats `body` forty times: a value that it doubles would grow to a terabyte.
fn doubled(first: &str, body: &str) -> String {
    let loops = "{% for i in range(40) %}BODY{% endfor %}".replace("BODY", body);
    format!("{{% set ns = namespace(x={first}) %}}{loops}")
}

#[test]
fn what_makes_much_of_little_is_refused_before_it_is_made() {
    let texts = [
        doubled("'abcdefghij' * 1000", "{% set ns.x = ns.x ~ ns.x %}"),
        doubled("'abcdefghij' * 1000", "{% set ns.x = ns.x + ns.x %}"),
        doubled("'abcdefghij'", "{% set ns.x = ns.x * 2 %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x = ns.x | replace('a', 'aaaa') %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x = ns.x.replace('a', 'aaaa') %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x = [ns.x, ns.x] | join(ns.x) %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x = [ns.x, ns.x] | string %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x = [ns.x, ns.x] | tojson %}"),
        doubled("'aaaaaaaaaa'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        doubled("'a\n' * 1000", "{% set ns.x = ns.x | indent(1000) %}"),
        // Raw text, in the output and in a capture.
        format!("{{% for i in range(100000) %}}{}{{% endfor %}}", "a".repeat(10_000)),
        format!("{{% set x %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}", "a".repeat(10_000)),
        "{% set n = 90000000 %}{% set x = 'a' * n %}{% for i in range(100) %}{{ x.strip() | length }}{% endfor %}"
            .into(),
        "{% set n = 40000000 %}{{ (('a ' * n).split(' ')) | length }}".into(),
        "{% set n = 60000000 %}{{ ('a' * n) | list | length }}".into(),
    ];
    for source in &texts {
        let error = refused(source, &room());
        assert!(error.contains(TOO_MUCH), "{source:.200}: {error}");
        // With less room, the missing room is the reason.
        let error = refused(source, &Traffic::new(64 << 20));
        assert!(error.contains("--request-bytes"), "{source:.200}: {error}");
    }
    for source in [
        "{% set n = 1000000 %}{{ ([1] * n) | length }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ [1] | batch(1000000, 0) | list }}",
        "{{ [1] | slice(1000000, 0) | list }}",
    ] {
        let error = refused(source, &room());
        assert!(error.contains(TOO_MANY), "{source}: {error}");
    }
    for source in [
        "{{ 'a' | indent(100000000) }}",
        "{{ 'a' | indent(width=100000000) }}",
        "{{ [1] | tojson(indent=100000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%*d' | format(1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{0:{1}}'.format(1, 1000000000) }}",
        "{{ '{:.1000000000f}'.format(1.5) }}",
    ] {
        let error = refused(source, &room());
        assert!(error.contains("pads text by more than 1024 characters"), "{source}: {error}");
    }
}

#[test]
fn counted_filters_take_arguments_by_name() {
    for (expression, text) in [
        ("x | map(attribute='a') | list", "[2, 1, 2]"),
        ("x | map(attribute='b', default='?') | join(', ')", "?, ?, ?"),
        ("x | join(d='-', attribute='a')", "2-1-2"),
        ("x | sum(attribute='a')", "5"),
        ("x | sort(attribute='a', reverse=true) | map(attribute='a') | list", "[2, 2, 1]"),
        ("x | unique(attribute='a') | list | length", "2"),
        ("'a\nb' | indent(width=2, first=true)", "  a\n  b"),
        ("x | batch(2, 0) | list | length", "2"),
    ] {
        let source = format!("{{% set x = [{{'a': 2}}, {{'a': 1}}, {{'a': 2}}] %}}{{{{ {expression} }}}}");
        assert_eq!(render(&template(&source), nothing()).expect(expression), text, "{expression}");
    }
}

#[test]
fn texts_with_numbers_are_formatted() {
    for (source, text) in [
        ("{{ '%s of 5000000' | format(1) }}", "1 of 5000000"),
        ("{{ '%5d%%|%-4s|' | format(7, 'a') }}", "    7%|a   |"),
        ("{{ 'in 2026: {:>4} {{}}'.format('x') }}", "in 2026:    x {}"),
        ("{{ '{}, {:.2f} and 100000'.format(1, 2.5) }}", "1, 2.50 and 100000"),
        ("{{ 'a\nb' | indent(2) }}{{ [1] | batch(2, 'fill') | list }}", "a\n  b[[1, 'fill']]"),
    ] {
        assert_eq!(render(&template(source), nothing()).expect(source), text, "{source}");
    }
}

#[test]
fn a_template_that_would_not_end_is_ended() {
    let nested = "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}";
    assert!(refused(nested, &room()).contains("takes more than 20000000 instructions"));
    // Each element contains the list before it twice: comparing two of them would visit a million million elements.
    let doubling = |operation: &str| {
        let lists = "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}";
        doubled("1, a=[1], b=[1]", lists) + operation
    };
    for operation in ["{{ ns.a == ns.b }}", "{{ ns.a | tojson }}", "{{ [ns.a] | unique | list }}"] {
        let error = refused(&doubling(operation), &room());
        assert!(error.contains("makes more than 4000000 elements"), "{operation}: {error}");
    }
}

#[test]
fn deep_values_and_cycles_do_not_overflow_the_stack() {
    for source in [
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x={}) %}{% for i in range(100000) %}{% set ns.x = {'x': ns.x} %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x | batch(1) | list %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = dict(x=ns.x) %}{% endfor %}",
    ] {
        let error = refused(source, &room());
        assert!(error.contains("nests lists and maps more than 400 levels deep"), "{source}: {error}");
    }
    for source in
        ["{% set ns.x = ns %}{{ ns }}", "{% set ns.x = [ns] %}{{ ns }}", "{% set ns.x = {'a': [ns]} %}{{ ns }}"]
    {
        let source = format!("{{% set ns = namespace() %}}{source}");
        assert!(refused(&source, &room()).contains("a namespace cannot be kept in a namespace"), "{source}");
    }
    // A hundred thousand slices of slices would be read through a hundred thousand calls.
    let slices = "{% set ns = namespace(x=[1, 2]) %}{% for i in range(100000) %}{% set ns.x = ns.x[:] %}{% endfor %}";
    assert_eq!(render(&template(&format!("{slices}{{{{ ns.x }}}}")), nothing()).expect("renders"), "[1, 2]");
}

#[test]
fn templates_that_are_too_large_to_parse_are_refused() {
    let config = |source: String| match ChatTemplate::new(source.into(), BTreeMap::new()) {
        Err(Error::Config(message)) => message,
        other => panic!("{other:?}"),
    };
    let large = config("a".repeat((1 << 20) + 1));
    assert_eq!(large, "the chat template has 1048577 bytes, and at most 1048576 are read; shorten it");
    ChatTemplate::new("a".repeat(1 << 20).into(), BTreeMap::new()).expect("the largest");
    for expression in ["1".to_string() + &"+1".repeat(250_000), "a".to_string() + &".a".repeat(250_000)] {
        assert!(config(format!("\n{{{{ {expression} }}}}")).contains("line 2: more than 4096 tokens in one tag"));
    }
    for expression in ["a".to_string() + &"+1".repeat(2000), "a".to_string() + &"|trim".repeat(2000)] {
        ChatTemplate::new(format!("{{{{ {expression} }}}}").into(), BTreeMap::new()).expect("a long expression");
    }
    let nested = |levels: usize| "{% if a %}".repeat(levels) + &"{% endif %}".repeat(levels);
    assert!(config(nested(40_000)).contains("more than 10000 tags"));
    assert!(config(nested(4000)).contains("maximum recursion"));
    let branches = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(9000));
    ChatTemplate::new(branches.into(), BTreeMap::new()).expect("many branches");
    for constant in ["'a' * 100000000", "100 * (100000 * ('a', 'b'))", "'a' * 2 ** 26", "(('abc' * 9999) * 999) * 99"] {
        assert!(config(format!("{{{{ {constant} }}}}")).contains("constants multiplied"), "{constant}");
    }
    ChatTemplate::new("{{ '-' * 40 }}{{ 1024 * 1024 * 1024 }}".into(), BTreeMap::new()).expect("small constants");
}

/// The templates of real models on ten thousand messages.
#[test]
fn real_templates_are_far_below_the_limits() {
    for name in ["llama3", "llama3.1", "mistral", "qwen2.5", "qwen2.5_tools", "qwen3", "smollm2"] {
        let source = read(Path::new(&format!("{FIXTURES}/{name}.jinja"))).expect("the fixture is there");
        let role = |i: usize| if i.is_multiple_of(2) { "user" } else { "assistant" };
        let turn = |i: usize| json!({ "role": role(i), "content": "a message of a few words" });
        let messages = (0..10_000).map(turn).collect();
        let conversation = Conversation { messages, add_generation_prompt: true, ..nothing() };
        let room = room();
        let (text, charge) = template(&source).render(conversation, &room).expect(name);
        assert!(text.len() > 240_000, "{name}");
        assert!(charge.bytes() >= text.capacity() as u64, "{name}: {charge:?}");
        assert!(charge.bytes() < 100 * text.len() as u64, "{name}: {charge:?} for {}", text.len());
        assert_eq!(room.used(), charge.bytes());
    }
}
