//! Line charts, as SVG to stand within a page.

use plotters::{
    coord::Shift,
    prelude::{
        ChartBuilder, Circle, Color as _, DrawingArea, IntoDrawingArea as _, IntoLogRange as _, LineSeries,
        PathElement, RGBColor, SVGBackend,
    },
    style::{BLACK, WHITE},
};

use super::CompareError;

/// One line of a chart.
pub(crate) struct Line {
    pub(crate) name: String,
    /// By x; both positive.
    pub(crate) points: Vec<(f64, f64)>,
}

/// What is drawn.
pub(crate) struct Chart<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    /// Names of the places on the x axis, which then lie at 1, 2 and so on. Empty: x is a number, on a logarithmic axis.
    pub(crate) places: &'a [&'a str],
    pub(crate) lines: Vec<Line>,
}

const SIZE: (u32, u32) = (720, 360);
/// Told apart with any kind of colour vision.
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];

impl Chart<'_> {
    /// The SVG; `None` without a point.
    pub(crate) fn svg(&self) -> Result<Option<String>, CompareError> {
        let points = || self.lines.iter().flat_map(|line| &line.points).filter(|point| point.0 > 0.0 && point.1 > 0.0);
        if points().next().is_none() {
            return Ok(None);
        }
        let bounds = |of: fn(&(f64, f64)) -> f64| {
            points().map(of).fold((f64::INFINITY, 0.0_f64), |(least, most), at| (least.min(at), most.max(at)))
        };
        let ((left, right), (bottom, top)) = (bounds(|point| point.0), bounds(|point| point.1));
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            let drawn = self.draw(&root, (left * 0.8, right * 1.25), (bottom * 0.7, top * 1.4));
            drawn.and_then(|()| root.present().map_err(|error| error.to_string())).map_err(CompareError::Chart)?;
        }
        Ok(Some(svg))
    }

    fn draw(
        &self,
        root: &DrawingArea<SVGBackend<'_>, Shift>,
        (left, right): (f64, f64),
        (bottom, top): (f64, f64),
    ) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        root.fill(&WHITE).map_err(|error| text(&error))?;
        let mut chart = ChartBuilder::on(root)
            .caption(self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(72)
            .build_cartesian_2d((left..right).log_scale(), (bottom..top).log_scale())
            .map_err(|error| text(&error))?;
        let name = |at: &f64| {
            if self.places.is_empty() {
                return super::outcome::digits(*at);
            }
            let near = self.places.iter().zip(1_u32..).find(|(_, place)| (f64::from(*place) - at).abs() < 0.01);
            near.map_or_else(String::new, |(name, _)| (*name).to_owned())
        };
        chart
            .configure_mesh()
            .x_desc(self.x)
            .y_desc(self.y)
            .x_labels(12)
            .x_label_formatter(&name)
            .y_label_formatter(&|at| super::outcome::digits(*at))
            .light_line_style(WHITE)
            .draw()
            .map_err(|error| text(&error))?;
        for (line, colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let style = colour.stroke_width(2);
            chart
                .draw_series(LineSeries::new(line.points.iter().copied(), style))
                .map_err(|error| text(&error))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
            chart
                .draw_series(line.points.iter().map(|&point| Circle::new(point, 3, colour.filled())))
                .map_err(|error| text(&error))?;
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()
            .map_err(|error| text(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_names_its_lines_and_needs_nothing_from_outside() {
        let line = |name: &str, factor| Line {
            name: name.to_owned(),
            points: vec![(64.0, 100.0 * factor), (4096.0, 10.0 * factor)],
        };
        let lines = vec![line("ours", 1.0), line("theirs", 2.0)];
        let svg = Chart { title: "rates", x: "bytes", y: "messages/s", places: &[], lines }.svg().unwrap().unwrap();
        for word in ["<svg", "ours", "theirs", "rates", "messages/s"] {
            assert!(svg.contains(word), "{word}");
        }
        assert!(!svg.contains("href"), "no link");
    }

    #[test]
    fn a_chart_of_nothing_is_left_out() {
        let lines = vec![Line { name: "x".to_owned(), points: Vec::new() }];
        assert_eq!(Chart { title: "", x: "", y: "", places: &[], lines }.svg().unwrap(), None);
    }
}
