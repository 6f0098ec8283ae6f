//! Named facts in groups, in the order in which they were found.

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::{Map, Value};

#[derive(Default)]
pub(crate) struct Facts {
    groups: Vec<(&'static str, Vec<(String, Value)>)>,
}

impl Facts {
    pub(crate) fn add(&mut self, group: &'static str, name: &str, value: impl Into<Value>) {
        let fact = (name.to_owned(), value.into());
        match self.groups.iter_mut().find(|(known, _)| *known == group) {
            Some((_, facts)) => facts.push(fact),
            None => self.groups.push((group, vec![fact])),
        }
    }

    pub(crate) fn json(&self) -> Value {
        let groups = self.groups.iter().map(|(group, facts)| {
            let facts: Map<String, Value> = facts.iter().cloned().collect();
            ((*group).to_owned(), Value::Object(facts))
        });
        Value::Object(groups.collect())
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new();
        table
            .load_preset(presets::UTF8_FULL_CONDENSED)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(TABLE_COLUMNS);
        table.set_header(["group", "what", "value"]);
        for (group, facts) in &self.groups {
            for (position, (name, value)) in facts.iter().enumerate() {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                table.add_row([if position == 0 { group } else { "" }, name, &text]);
            }
        }
        table
    }
}

const TABLE_COLUMNS: u16 = 120;
