//! A line for each server, drawn as SVG: both axes by powers of ten where what they show grows so.

use std::fmt::Write as _;

/// What one server did: (how many, how much).
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A drawing.
pub(crate) struct Plot<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    pub(crate) series: &'a [Series],
}

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 40.0;
const RIGHT: f64 = 150.0;
const BOTTOM: f64 = 50.0;
const COLOURS: [&str; 4] = ["#0a7d4f", "#b3541e", "#3558b0", "#777777"];

/// From figures to places.
struct Axis {
    low: f64,
    high: f64,
    is_powers: bool,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        if low > 0.0 && high / low >= 20.0 {
            return Self { low: low.log10().floor(), high: high.log10().ceil(), is_powers: true };
        }
        Self { low: 0.0, high: if high > 0.0 { high * 1.1 } else { 1.0 }, is_powers: false }
    }

    /// Between 0 and 1.
    fn place(&self, value: f64) -> f64 {
        let value = if self.is_powers { value.log10() } else { value };
        (value - self.low) / (self.high - self.low).max(f64::EPSILON)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.is_powers {
            let (mut ticks, mut at) = (Vec::new(), self.low);
            while at <= self.high {
                ticks.push(10_f64.powf(at));
                at += 1.0;
            }
            return ticks;
        }
        (0..=4_u8).map(|part| self.high * f64::from(part) / 4.0).collect()
    }
}

impl Plot<'_> {
    pub(crate) fn svg(&self) -> String {
        let all = || self.series.iter().flat_map(|series| series.points.iter());
        let (x, y) = (Axis::of(all().map(|point| point.0)), Axis::of(all().map(|point| point.1)));
        let across = |value: f64| LEFT + x.place(value) * (WIDTH - LEFT - RIGHT);
        let up = |value: f64| HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"22\" font-size=\"14\">{}, {}</text>\n",
            self.title, self.y
        );
        for tick in y.ticks() {
            let (at, end) = (up(tick), WIDTH - RIGHT);
            let _infallible = writeln!(
                svg,
                "<path d=\"M{LEFT} {at:.1}H{end}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                crate::table::figure(tick)
            );
        }
        for tick in x.ticks() {
            let (at, bottom) = (across(tick), HEIGHT - BOTTOM);
            let _infallible = writeln!(
                svg,
                "<path d=\"M{at:.1} {bottom}v5\" stroke=\"#555\"/><text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 20.0,
                (tick * 10.0).round() / 10.0
            );
        }
        let _infallible = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, WIDTH - RIGHT),
            HEIGHT - 8.0,
            self.x
        );
        for (nth, Series { name, points }) in self.series.iter().enumerate() {
            let colour = COLOURS[nth % COLOURS.len()];
            let line: Vec<String> = points.iter().map(|point| format!("{:.1},{:.1}", across(point.0), up(point.1))).collect();
            let _infallible =
                writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", line.join(" "));
            for point in points {
                let (at, height) = (across(point.0), up(point.1));
                let _infallible = writeln!(svg, "<circle cx=\"{at:.1}\" cy=\"{height:.1}\" r=\"3\" fill=\"{colour}\"/>");
            }
            if let Some(last) = points.last() {
                let (at, height) = (across(last.0) + 8.0, up(last.1) + 4.0);
                let _infallible = writeln!(svg, "<text x=\"{at:.1}\" y=\"{height:.1}\" fill=\"{colour}\">{name}</text>");
            }
        }
        svg.push_str("</svg>\n");
        svg
    }
}
