//! Patterns with `*` (any characters) and `?` (one character), for names of test targets.

/// Whether the whole name matches.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut next) = (0, 0);
    let mut star: Option<(usize, usize)> = None; // the last `*`, and how far it reaches
    while next < name.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, next));
                at += 1;
            }
            Some(c) if *c == '?' || *c == name[next] => {
                at += 1;
                next += 1;
            }
            _ => {
                let Some((star_at, reach)) = star else {
                    return false;
                };
                star = Some((star_at, reach + 1));
                at = star_at + 1;
                next = reach + 1;
            }
        }
    }
    pattern[at..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name) in [("rxe_*", "rxe_"), ("rxe_*", "rxe_a"), ("*_b?d*", "a_bad_b_bedx"), ("x", "x"), ("", "")]
        {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("rxe_*", "rxe2_a"), ("rxe", "rxe_"), ("?", ""), ("*a", "ab"), ("x", "")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn many_stars_take_no_time() {
        assert!(!matches(&"*a".repeat(40), &"a".repeat(39)));
        assert!(!matches(&format!("{}b", "*a".repeat(30)), &"a".repeat(2000)));
    }
}
