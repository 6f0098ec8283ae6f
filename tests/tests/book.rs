//! The book and the code agree: each error message has its entry, and each test that the book names is there.

use std::{
    fs,
    path::{Path, PathBuf},
};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace").to_path_buf()
}

/// All sources below a folder.
fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for path in fs::read_dir(dir).expect("sources").flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

/// Whether a source is no part of what users see: the simulated device, and tests.
fn is_internal(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "sim" || part.as_os_str().to_string_lossy().contains("test"))
}

/// The string literals of `#[error("...")]`, unescaped.
fn texts(source: &str) -> Vec<String> {
    let attributes = source.split("#[error(").skip(1);
    let literals = attributes.filter_map(|rest| rest.trim_start().strip_prefix('"'));
    literals
        .map(|literal| {
            let (mut text, mut chars) = (String::new(), literal.chars().peekable());
            while let Some(char) = chars.next().filter(|char| *char != '"') {
                match (char, chars.peek()) {
                    ('\\', Some('\n')) => while chars.next_if(|char| char.is_whitespace()).is_some() {},
                    ('\\', _) => text.extend(chars.next()),
                    _ => text.push(char),
                }
            }
            text
        })
        .collect()
}

/// What of a text is the same each time: its longest part between two numbers, cut to what a table has room for.
fn mark(text: &str) -> String {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((part, behind)) = rest.split_once('{') {
        parts.push(part);
        rest = behind.split_once('}').map_or("", |(_, rest)| rest);
    }
    parts.push(rest);
    let trim = |part: &str| part.trim_matches(|char: char| " :;,.()".contains(char)).to_owned();
    let longest = parts.into_iter().map(trim).max_by_key(String::len).unwrap_or_default();
    longest.chars().take(40).collect()
}

#[test]
fn every_error_text_has_an_entry() {
    let root = workspace();
    let page = fs::read_to_string(root.join("docs/troubleshooting.md")).expect("the page");
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut files = Vec::new();
    for part in ["bootstrap/src", "verbs-transport/src", "rma/src"] {
        sources(&root.join(part), &mut files);
    }
    let (mut found, mut missing) = (0, Vec::new());
    for file in files.into_iter().filter(|file| !is_internal(file.strip_prefix(&root).expect("below it"))) {
        for text in texts(&fs::read_to_string(&file).expect("a source")) {
            let mark = mark(&text);
            // Of some nothing is left but what stands beneath them, which has texts of its own.
            if mark.chars().filter(|char| char.is_alphabetic()).count() < 4 {
                continue;
            }
            found += 1;
            if !page.contains(mark.trim_end()) {
                missing.push(format!("{}: {text}", file.strip_prefix(&root).expect("below it").display()));
            }
        }
    }
    assert!(found > 130, "only {found} error texts: are they written in another way now?");
    assert!(missing.is_empty(), "docs/troubleshooting.md has no entry for:\n{}", missing.join("\n"));
}

#[test]
fn marks_are_what_stays_the_same() {
    let source = "#[error(\"{a} is \\\n    the \\\"best\\\" of {b:?}; {c}\")] #[error(transparent)]";
    assert_eq!(texts(source), ["{a} is the \"best\" of {b:?}; {c}"]);
    assert_eq!(mark("{a} is the \"best\" of {b:?}; {c}"), "is the \"best\" of");
}

#[test]
fn every_test_that_the_scenarios_name_is_there() {
    let root = workspace();
    let mut files = Vec::new();
    for part in ["bootstrap", "verbs-transport/src", "engine/src", "engine/tests", "tests/src", "tests/tests"] {
        sources(&root.join(part), &mut files);
    }
    let code: String = files.iter().map(|file| fs::read_to_string(file).expect("a source")).collect();
    let page = fs::read_to_string(root.join("docs/scenarios.md")).expect("the page");
    // Of the tables, everything in backticks that has the form of a test's name.
    let (_, tables) = page.split_once("## MT-1 to MT-30").expect("the tables");
    let quoted = tables.split('`').skip(1).step_by(2);
    let names: Vec<&str> = quoted
        .filter(|name| name.chars().all(|char| char.is_ascii_lowercase() || char.is_ascii_digit() || char == '_'))
        .collect();
    assert!(names.len() > 100, "only {} names", names.len());
    let missing: Vec<_> = names
        .iter()
        .filter(|name| !code.contains(&format!("fn {name}(")) && !code.contains(&format!("fn {name}<")))
        .collect();
    assert!(missing.is_empty(), "docs/scenarios.md names what is no test: {missing:?}");
}
