"""Small edits of the scripts that change what they compute, each with the test that it must break.

(file, text that stands there once, text put in its place, test file::test). tests/test_mutants.py runs them all.
"""

MUTANTS = [
    # the schedule and the shortcut
    ("mae.py", "linspace(1.0, alpha_min, 2 * depth", "linspace(1.0, 1.0, 2 * depth", "test_equations.py::test_schedule_falls_in_equal_steps_from_one_to_alpha_min"),
    ("mae.py", "linspace(1.0, alpha_min, 2 * depth", "linspace(1.0, alpha_min, 2 * depth + 1", "test_equations.py::test_schedule_falls_in_equal_steps_from_one_to_alpha_min"),
    ("mae.py", "self.attn(self.norm1(x)), x, alpha=self.alpha_attn", "self.attn(self.norm1(x)), x, alpha=1.0", "test_equations.py::test_encoder_is_equation_4"),
    ("mae.py", "torch.add(self.mlp(self.norm2(x)), x, alpha=self.alpha_mlp)", "torch.add(x, self.mlp(self.norm2(x)), alpha=self.alpha_mlp)", "test_equations.py::test_encoder_is_equation_4"),
    ("mae.py", "alphas[2 * l], alphas[2 * l + 1]", "alphas[2 * l + 1], alphas[2 * l]", "test_equations.py::test_encoder_is_equation_4"),
    ("mae.py", "nn.init.zeros_(block.mlp[-1].weight)", "pass", "test_equations.py::test_untrained_encoder_only_scales_its_input"),
    # patches and masks
    ("mae.py", '"b (h w) (p q c) -> b c (h p) (w q)"', '"b (h w) (q p c) -> b c (h p) (w q)"', "test_mae.py::test_unpatchify_inverts_patchify"),
    ("mae.py", '"b c (h p) (w q) -> b (h w) (p q c)"', '"b c (h p) (w q) -> b (w h) (p q c)"', "test_mae.py::test_one_pixel_moves_one_token"),
    ("mae.py", "shuffle[:, :kept], shuffle[:, kept:]", "shuffle[:, kept:], shuffle[:, :kept]", "test_mae.py::test_kept_and_masked_partition_the_patches"),
    ("mae.py", "shuffle[:, kept:], shuffle.argsort(dim=1)", "shuffle[:, kept:], shuffle", "test_mae.py::test_unshuffle_puts_an_order_revealing_input_back_in_place"),
    ("mae.py", "positions = take(patches, kept), positions[kept]", "positions = take(patches, kept), positions[: kept.shape[1]]", "test_mae.py::test_encoder_sees_the_kept_patches_at_their_positions"),
    ("mae.py", "for angle in angles for wave in", "for angle in angles[::-1] for wave in", "test_mae.py::test_positions_are_he_et_als_sine_and_cosine"),
    # targets and loss
    ("mae.py", "(variance + 1e-6).sqrt()", "variance.sqrt()", "test_mae.py::test_constant_patches_are_finite_targets"),
    ("mae.py", "    patches = patches.float()\n", "", "test_mae.py::test_normalized_patches_have_mean_zero_and_deviation_one_and_can_be_undone"),
    ("mae.py", "torch.var_mean(patches, dim=-1, keepdim=True)", "torch.var_mean(patches, dim=(1, 2), keepdim=True)", "test_mae.py::test_loss_is_he_et_als_mean_over_masked_patches"),
    ("mae.py", "normalized(take(patches, masked))", "normalized(take(patches, masked.flip(1)))", "test_mae.py::test_loss_is_he_et_als_mean_over_masked_patches"),
    ("mae.py", "return F.mse_loss(prediction.float(), target)", "return F.l1_loss(prediction.float(), target)", "test_mae.py::test_loss_is_he_et_als_mean_over_masked_patches"),
    # skips and decoder
    ("mae.py", "deepest_first = layers[::-2]", "deepest_first = layers[1::2]", "test_mae.py::test_skips_pair_deepest_first"),
    ("mae.py", "deepest_first = layers[::-2]", "deepest_first = layers[-2::-2]", "test_mae.py::test_skips_pair_deepest_first"),
    ("mae.py", "unshuffle(layer, self.token, restore)], dim=-1", "unshuffle(layer, self.token * 0, restore)], dim=-1", "test_mae.py::test_skip_sees_kept_tokens_in_place_and_its_token_where_masked"),
    ("mae.py", "return x + self.join(", "return self.join(", "test_mae.py::test_skip_sees_kept_tokens_in_place_and_its_token_where_masked"),
    ("mae.py", "unshuffle(self.decoder_embed(layers[-1]), self.mask_token", "unshuffle(self.decoder_embed(layers[0]), self.mask_token", "test_mae.py::test_without_unet_the_decoder_is_he_et_als"),
    ("mae.py", "self.head(self.decoder_norm(x))", "self.head(x)", "test_mae.py::test_without_unet_the_decoder_is_he_et_als"),
    ("mae.py", "(images - self.mean[:, None, None]) / self.std", "(images - self.mean[:, None, None]) * self.std", "test_mae.py::test_images_are_standardised_with_the_data_sets_mean_and_deviation"),
    ("mae.py", "decode(list(self.encode(patches, kept)), restore) * deviation + mean", "decode(list(self.encode(patches, kept)), restore)", "test_mae.py::test_a_perfect_prediction_reconstructs_the_image"),
    ("mae.py", "scatter(1, kept, False)", "scatter(1, masked, False)", "test_mae.py::test_reconstruction_keeps_visible_patches_whatever_the_prediction"),
    # the optimiser's schedule
    ("mae.py", "return peak * 0.5 * (1 + math.cos", "return peak * 0.5 * (1 - math.cos", "test_mae.py::test_learning_rate_warms_up_linearly_and_falls_as_a_cosine"),
    ("mae.py", "peak = config.lr * batch / 256", "peak = config.lr", "test_mae.py::test_learning_rate_warms_up_linearly_and_falls_as_a_cosine"),
    # effective rank, cumulative decay, correlation
    ("rank.py", "entr(sigma / sigma.sum())", "entr(sigma)", "test_rank.py::test_entropy_is_equation_6"),
    ("rank.py", "return torch.special.entr(", "return -torch.special.entr(", "test_rank.py::test_entropy_of_m_equal_values_is_log_m"),
    ("rank.py", "sigma = sigma / largest", "pass", "test_rank.py::test_entropy_of_values_whose_sum_overflows"),
    ("rank.py", "z.mean(dim=1, keepdim=True)", "z.mean(dim=0, keepdim=True)", "test_rank.py::test_effective_rank_centres_samples_and_not_channels"),
    ("rank.py", "torch.linalg.eigvalsh(z.T @ z)", "torch.linalg.svdvals(z)", "test_rank.py::test_effective_rank_of_orthogonal_samples_is_the_entropy_of_their_squared_lengths"),
    ("rank.py", "rounding = 4 *", "rounding = 0 *", "test_rank.py::test_effective_rank_of_constant_rows_is_exactly_0"),
    ("rank.py", "features.detach().cpu().double()", "features.detach().cpu().float()", "test_rank.py::test_effective_rank_computes_in_float64_whatever_comes_in"),
    ("rank.py", "return math.prod(", "return sum(", "test_rank.py::test_alpha_eff_is_the_product"),
    ("rank.py", "if product < target", "if product > target", "test_rank.py::test_alpha_min_for_is_the_inverse_of_alpha_eff"),
    ("rank.py", "* i / (count - 1)", "* i / count", "test_rank.py::test_alpha_min_for_is_the_inverse_of_alpha_eff"),
    ("rank.py", "series - series.mean()", "series", "test_rank.py::test_pearson_is_numpys"),
    # data
    ("probe.py", "by_class[torch.argsort(turn, stable=True)][:limit]", "by_class[:limit]", "test_probe.py::test_evenly_takes_every_class_in_turn"),
    ("probe.py", "enumerate(classes) for path in by_class.get(name, [])", "enumerate(sorted(by_class)) for path in by_class[name]", "test_probe.py::test_test_labels_go_through_the_train_classes"),
    ("probe.py", "labels[chosen][readable]", "labels[chosen][: len(readable)]", "test_probe.py::test_unreadable_images_are_left_out_with_their_labels"),
    ("probe.py", "stat and stat.st_mtime_ns", "0", "test_probe.py::test_a_changed_folder_is_decoded_again"),
    ("probe.py", "values / 257", "values", "test_probe.py::test_files_of_every_kind_arrive_as_rgb"),
    ("probe.py", "(size[1], size[0])", "(size[0], size[1])", "test_probe.py::test_decoding_is_pillows_bicubic_fit_of_any_size"),
    ("probe.py", "images.permute(0, 3, 1, 2)", "images.permute(0, 3, 2, 1)", "test_probe.py::test_cifars_channels_come_first_and_in_order"),
    # augmentation
    ("probe.py", "columns.flip(1), columns)", "columns, columns)", "test_probe.py::test_flipped_crops_are_mirrored_from_left_to_right"),
    ("probe.py", "_resize_matrix(top, height,", "_resize_matrix(left, height,", "test_probe.py::test_crops_are_torchvisions"),
    ("probe.py", "near = (1.5 * x - 2.5) * x", "near = (1.25 * x - 2.25) * x", "test_probe.py::test_crops_are_torchvisions"),
    ("probe.py", "/ scale.clamp(min=1)", "/ scale", "test_probe.py::test_crops_are_torchvisions"),
    ("probe.py", "torch.where(x < 2, far, 0.0)) * inside", "torch.where(x < 2, far, 0.0))", "test_probe.py::test_crops_are_torchvisions"),
    ("probe.py", "torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * draws[..., 1])", "ratio[0] + (ratio[1] - ratio[0]) * draws[..., 1]", "test_probe.py::test_boxes_are_distributed_as_torchvisions"),
    ("probe.py", "(place[:, 0] * (height - h + 1)).floor()", "(place[:, 0] * (height - h)).floor()", "test_probe.py::test_boxes_keep_to_the_range_of_area_and_ratio_and_reach_its_ends"),
    ("probe.py", "scale=(min_scale, 1.0)", "scale=(min_scale, min_scale)", "test_probe.py::test_augmented_images_are_crops_of_their_own_and_half_of_them_are_mirrored"),
    # features and protocols
    ("probe.py", "model.eval()", "model.train()", "test_probe.py::test_features_are_the_mean_and_the_first_of_every_layers_tokens"),
    ("probe.py", "module.training = training", "module.training = True", "test_probe.py::test_features_leave_the_model_and_the_random_stream_as_they_were"),
    ("probe.py", "tokens.mean(dim=1)", "tokens[:, 1:].mean(dim=1)", "test_probe.py::test_features_are_the_mean_and_the_first_of_every_layers_tokens"),
    ("probe.py", "x, y = standardised(train),", "x, y = train.transpose(0, 1),", "test_probe.py::test_the_linear_probe_does_not_depend_on_scale_and_shift_of_the_features"),
    ("probe.py", "(features - mean) / deviation", "(features - features.mean(dim=0)) / deviation", "test_probe.py::test_a_test_image_is_judged_by_itself"),
    ("probe.py", "y[index].expand(sets, -1), reduction", "y[index.flip(0)].expand(sets, -1), reduction", "test_probe.py::test_feature_sets_trained_together_are_as_alone_in_any_order"),
    ("probe.py", "torch.linalg.inv(unwhiten).float()", "torch.eye(width).expand(sets, -1, -1)", "test_probe.py::test_the_linear_probe_is_logistic_regression_on_features_that_lie_almost_in_a_line"),
    ("probe.py", " + weight.square().sum() / (2 * n)", "", "test_probe.py::test_the_linear_probe_is_logistic_regression_on_features_that_lie_almost_in_a_line"),
    ("probe.py", "F.normalize(train[:, layer], dim=1), F.normalize(test[:, layer], dim=1)", "train[:, layer], test[:, layer]", "test_probe.py::test_knn_does_not_depend_on_the_chunk_the_order_or_the_lengths_of_features"),
    ("probe.py", "temperature: float = 0.07", "temperature: float = 0.072", "test_probe.py::test_a_neighbours_vote_is_exp_of_its_similarity_over_the_temperature"),
    ("probe.py", "k: int = 20,", "k: int = 21,", "test_probe.py::test_knn_takes_20_neighbours_at_a_temperature_of_7_hundredths"),
    ("probe.py", "train[used], labels[used], (train[held]", "train[order], labels[order], (train[held]", "test_probe.py::test_the_held_out_tenth_is_not_trained_on"),
    ("probe.py", 'key=lambda i: layers[i]["held_out"]', 'key=lambda i: layers[i]["linear"]', "test_probe.py::test_the_best_layer_is_chosen_by_held_out_accuracy_and_counted_from_1"),
]  # fmt: skip
