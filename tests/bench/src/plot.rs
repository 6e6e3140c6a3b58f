//! How a figure grows with the size of the problem, drawn as SVG.

use plotters::prelude::{
    ChartBuilder, Circle, Color as _, IntoDrawingArea as _, IntoLogRange as _, LineSeries, Palette as _, Palette99,
    PathElement, SVGBackend, SeriesLabelPosition, WHITE,
};

use crate::report::Summary;

/// The medians of everybody, against the size, both on a logarithmic scale.
pub(crate) fn lines(figure: &str, size: &str, summaries: &[Summary]) -> Result<String, String> {
    let of_figure: Vec<_> =
        summaries.iter().filter(|summary| summary.figure == figure && summary.median > 0.0).collect();
    let mut contestants: Vec<&str> = Vec::new();
    for summary in &of_figure {
        if !contestants.contains(&summary.contestant) {
            contestants.push(summary.contestant);
        }
    }
    let [mut left, mut right] = [f64::MAX, 0.0_f64];
    let [mut low, mut high] = [f64::MAX, 0.0_f64];
    for summary in &of_figure {
        (left, right) = (left.min(number(summary.size)), right.max(number(summary.size)));
        (low, high) = (low.min(summary.median), high.max(summary.median));
    }
    if of_figure.is_empty() {
        return Err("it was not measured".to_owned());
    }

    let mut svg = String::new();
    let drawn = (|| -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::with_string(&mut svg, (720, 420)).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(figure, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(56)
            .build_cartesian_2d((left * 0.8..right * 1.25).log_scale(), (low * 0.8..high * 1.25).log_scale())?;
        chart.configure_mesh().x_desc(size).draw()?;
        for (place, contestant) in contestants.iter().enumerate() {
            let color = Palette99::pick(place).to_rgba();
            let of_contestant = of_figure.iter().filter(|summary| summary.contestant == *contestant);
            let points: Vec<_> = of_contestant.map(|summary| (number(summary.size), summary.median)).collect();
            chart
                .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))?
                .label(*contestant)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
            chart.draw_series(points.into_iter().map(|point| Circle::new(point, 3, color.filled())))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .draw()?;
        area.present()?;
        Ok(())
    })();
    drawn.map_err(|error| error.to_string())?;
    Ok(svg)
}

/// Sizes are far below what a float holds exactly.
#[expect(clippy::cast_precision_loss, reason = "see above")]
fn number(size: usize) -> f64 {
    size as f64
}
