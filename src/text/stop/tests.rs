use super::*;

fn matcher(strings: &[&str]) -> StopMatcher {
    StopMatcher::new(Arc::new(StopStrings::new(strings)))
}

/// Byte length of the text before the stop string that ends first; if several end there, before the longest.
fn naive(text: &str, strings: &[&str]) -> Option<usize> {
    (1..=text.len()).find_map(|end| {
        let ended = strings.iter().filter(|s| text.as_bytes()[..end].ends_with(s.as_bytes()));
        ended.map(|s| s.len()).max().map(|longest| end - longest)
    })
}

fn naive_held_back(text: &str, strings: &[&str]) -> usize {
    let is_beginning =
        |n: &usize| strings.iter().any(|s| *n < s.len() && text.as_bytes().ends_with(&s.as_bytes()[..*n]));
    (0..=text.len()).rev().find(is_beginning).unwrap_or(0)
}

#[test]
fn random_texts_in_random_pieces_agree_with_a_naive_search() {
    let mut state = 0xC0FFEE_u64;
    println!("seed {state:#x}");
    let mut below = move |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let mut found = 0;
    for _ in 0..20_000 {
        // Three letters, so that partial and overlapping matches are frequent. One letter has two bytes.
        let mut word =
            |longest| -> String { (0..=below(longest)).map(|_| ['a', 'b', 'é'][below(3) as usize]).collect() };
        let strings: Vec<String> = vec![word(4), word(6), word(6)];
        let text = word(30);
        let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
        let mut matcher = matcher(&strings);
        let (mut result, mut start) = (None, 0);
        while start < text.len() && result.is_none() {
            let longer = start + 1 + below(5) as usize;
            let end = (longer..).find(|&i| i >= text.len() || text.is_char_boundary(i)).unwrap().min(text.len());
            result = matcher.push(&text[start..end]);
            if result.is_none() {
                assert_eq!(matcher.held_back(), naive_held_back(&text[..end], &strings), "{text:?} {strings:?}");
            }
            start = end;
        }
        assert_eq!(result, naive(&text, &strings), "{text:?} {strings:?}");
        found += usize::from(result.is_some());
    }
    assert!((5_000..19_500).contains(&found), "{found} of 20000 had a stop string");
}

#[test]
fn across_pieces() {
    let mut stop = matcher(&["\n\nUser:", "END"]);
    assert_eq!(stop.push("Yes. E"), None);
    assert_eq!(stop.held_back(), 1);
    assert_eq!(stop.push("N"), None);
    assert_eq!(stop.push("\n"), None);
    assert_eq!(stop.held_back(), 1);
    assert_eq!(stop.push(""), None);
    assert_eq!(stop.push("\nUs"), None);
    assert_eq!(stop.held_back(), 4);
    assert_eq!(stop.push("er: END"), Some(7));
    assert_eq!(matcher(&["b", "aab", "ab"]).push("xaab"), Some(1));
    let mut none = matcher(&[]);
    assert_eq!((none.push("text"), none.held_back()), (None, 0));
}
